-- No more items for now. Argument: batch.
if redis.call('EXISTS', batch_key(arg(1))) == 0 then return 'unknown' end
redis.call('HSET', batch_key(arg(1)), 'sealed', '1')
return 'ok'
