-- The batch's jobs outside cannot be fed now: others have their turn. Argument: batch.
redis.call('ZADD', P .. 'chunks', 'XX', redis.call('HINCRBY', P .. 'clock', 'place', 1), arg(1))
return 'ok'
