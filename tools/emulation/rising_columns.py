import numpy as np, sys
rng=np.random.default_rng(0)
signs=0xD7E8
S=np.array([-1.0 if signs>>i&1 else 1.0 for i in range(16)])
H=(np.array([[(-1.0)**bin(i&j).count("1") for j in range(16)] for i in range(16)])*S).astype(np.float32)/4
bias=float(sys.argv[1]); greedy=int(sys.argv[2]); late=int(sys.argv[3]); FEW=int(sys.argv[4]) if len(sys.argv)>4 else 8
C=30; R=int(sys.argv[5]) if len(sys.argv)>5 else 12
sgn=S[0::2]*S[1::2]
kr=np.zeros((C,8)); kc=np.zeros((C,8))
wr=np.zeros((C,8,8)); wc=np.zeros((C,8,8))
gr=gc=0.0
heard=np.zeros((C,8,8,2))
for r in range(R):
    one=many=lanes=0
    hearing = r<8 or r%4==0
    ngr,ngc=gr,gc
    worst=0
    for c in range(C):
        y=rng.standard_normal((16,8192),dtype=np.float32)+bias
        t=np.abs(H@y).reshape(16,8,8,32,4).max(axis=(0,4))
        a=np.abs(y).reshape(16,8,8,32,4).max(axis=(0,4))
        p=np.abs(y[0::2]+y[1::2]); q=np.abs(y[0::2]-y[1::2])
        d=(sgn<0)[:,None]
        b=np.maximum(np.where(d,q,p).sum(0),np.where(d,p,q).sum(0)).reshape(8,8,32,4).max(axis=3)
        rest=0.017*max(bias,0)+0.001
        for k in range(8):
            for w in range(8):
                if hearing:
                    m=heard[c,k,w] if (late and r<3) else heard[c,k,0]
                    kr[c,k]=max(kr[c,k],m[0]); kc[c,k]=max(kc[c,k],m[1])
                    wr[c,k,w]=max(wr[c,k,w],kr[c,k]); wc[c,k,w]=max(wc[c,k,w],kc[c,k])
                done=np.zeros(32,bool); cost=0
                while True:
                    rise=((a[k,w]>=wr[c,k,w]*0.979-rest)|(b[k,w]>=wc[c,k,w]*3.68-16*rest))&~done
                    n=rise.sum()
                    if n==0: break
                    if n>FEW and not (greedy and cost<greedy):
                        many+=1; fa=a[k,w].max(); ft=t[k,w].max(); done[:]=True; cost+=5
                    elif greedy:
                        i=np.argmax(np.where(rise,b[k,w],-1)); lanes+=1; fa=a[k,w,i]; ft=t[k,w,i]; done[i]=True; cost+=1
                    else:
                        lanes+=n; fa=a[k,w][rise].max(); ft=t[k,w][rise].max(); done|=rise; cost+=n
                    wr[c,k,w]=max(wr[c,k,w],fa); wc[c,k,w]=max(wc[c,k,w],ft)
                    kr[c,k]=max(kr[c,k],fa); kc[c,k]=max(kc[c,k],ft); ngr=max(ngr,fa); ngc=max(ngc,ft)
                    if greedy: wr[c,k,w]=max(wr[c,k,w],kr[c,k]); wc[c,k,w]=max(wc[c,k,w],kc[c,k])
                one+=cost>0; worst=max(worst,cost)
            if hearing and not late: heard[c,k,:]=(gr,gc)
    gr,gc=ngr,ngc
    if late: heard[:]=(gr,gc)
    print(r,"warps %d lanes %d many %d worst %d"%(one,lanes,many,worst), "known %.2f %.2f"%(gr,gc), flush=True)
