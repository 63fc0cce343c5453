-- Fails when the store takes no writes.
redis.call('SET', P .. 'ping', now, 'PX', DAY)
return 'ok'
