-- The batch's next file cannot be written now; others go on. Arguments: batch, for how many ms.
if redis.call('EXISTS', batch_key(arg(1))) == 1 then redis.call('HSET', batch_key(arg(1)), 'blocked', now + tonumber(arg(2))) end
return 'ok'
