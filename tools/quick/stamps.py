import numpy as np, sys
NL=int(sys.argv[1])
for n in sys.argv[2:]:
    a=np.fromfile(f"lines/{n}.amax",dtype=np.uint64).reshape(-1,8).astype(np.int64)
    c=np.fromfile(f"lines/{n}.codes",dtype=np.uint64).reshape(-1,8).astype(np.int64)
    t0=a[:,0].min()
    A=(a[:,:3]-t0)/1e3
    C=(c[:,:7]-t0)/1e3
    print(n,"amax blocks",len(A),"codes",len(C))
    print(" amax large: start %.2f..%.2f end pct"%(A[:NL,0].min(),A[:NL,0].max()),np.percentile(A[:NL,1],[0,10,50,90,100]).round(1), "given", np.percentile(A[:NL,2]-A[:NL,1],[50,100]).round(2))
    if len(A)>NL: print(" small: start",np.percentile(A[NL:,0],[0,10,50,90,100]).round(1),"end",np.percentile(A[NL:,2],[0,10,50,90,100]).round(1))
    end=A[:,2].max(); print(" amax end",end.round(2))
    o=np.argsort(C[:,0]); 
    first=C[:660]
    for i,l in enumerate(["entry","tile there","made","tables","rows done","tile done","end"]):
        if first[:,i].max()<0: continue
        print("  first 660 blocks",l,np.percentile(first[:,i],[0,10,50,90,100]).round(2))
    print("  entry sorted: ",[C[o[k],0].round(1) for k in (0,100,300,500,600,659,660,700,1000,1319)])
    tail=np.sort(C[:,6]); print("  ends: last %.1f; 100th last %.1f 300th %.1f 660th %.1f"%(tail[-1],tail[-100],tail[-300],tail[-660]))
    # durations
    d=C[:,6]-C[:,0]; print("  blocks", "median dur", np.median(d[660:]).round(2))
    rest=C[660:]
    for i,j,l in ((0,1,"entry->tile"),(1,2,"make"),(2,3,"tables"),(3,4,"rows"),(1,4,"tile->rows"),(4,5,"cols"),(5,6,"rest")):
        print("   ",l,"median %.2f  first %.2f"%(np.median(rest[:,j]-rest[:,i]),np.median(first[:,j]-first[:,i])))
    g=A[:,2]-A[:,1]; print(" given pct",np.percentile(g,[0,5,25,50,75,95,100]).round(2))
    w=first[:,3]-np.maximum(first[:,2],end) if first[:,2].max()>0 else first[:,3]-end
    print(" tables after max(made, amax end):", np.percentile(w,[0,5,25,50,75,95,100]).round(2), "late ones only", np.percentile(w[first[:,2]<end] if first[:,2].max()>0 else w,[0,25,50,75,100]).round(2))
