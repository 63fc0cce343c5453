-- The fields of a batch, one after the other. Argument: batch.
return redis.call('HGETALL', batch_key(arg(1)))
