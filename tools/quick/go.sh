t0=$(date +%s)
order=main,S,SG,S4,G1,main2
( bash variants/build.sh ) 2>&1 | tail -5
echo built $(( $(date +%s) - t0 )) $(ls variants/*/te_dist/*.so | wc -l)
mkdir -p $OUT/q $OUT/lines
for v in ${order//,/ }; do (cd variants/$v && OMP_NUM_THREADS=1 PYTHONPATH=$PWD timeout 60 python3 ../quick.py $v $order $OUT/q > $OUT/q/log.$v 2>&1) & done
wait
echo done $(( $(date +%s) - t0 )); cat $OUT/q/log.* | head -20
python3 variants/table2.py $OUT/q $order | tee $OUT/table.txt; rm -rf $OUT/q
for v in main S SG; do (cd variants/$v && OMP_NUM_THREADS=1 PYTHONPATH=$PWD timeout 30 python3 ../starts.py "gelu + nvfp4 1x16 RHT, row+column" "gelu with bias + nvfp4 1x16 RHT, row+column" 2>&1 | grep -v WARN | tail -2 | sed "s/^/$v /"); done; echo end $(( $(date +%s) - t0 ))
