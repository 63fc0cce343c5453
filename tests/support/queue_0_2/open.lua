-- Creates a batch or finds it. Arguments: batch, owner, metadata, options, digest of the options.
local key = batch_key(arg(1))
local h = redis.call('HMGET', key, 'owner', 'options')
if h[1] then
  if h[1] ~= arg(2) then return 'unknown' end
  if h[2] ~= arg(4) then return 'differs' end
  return 'ok'
end
redis.call('HSET', key, 'owner', arg(2), 'metadata', arg(3), 'options', arg(4), 'options_sha256', arg(5), 'created', now)
redis.call('ZADD', P .. 'batches', now, arg(1))
redis.call('ZADD', P .. 'o:' .. arg(2), now, arg(1))
keep_until_expiry(arg(1))
return 'ok'
