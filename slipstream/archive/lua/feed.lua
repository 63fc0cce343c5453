-- Puts jobs of the first chunk of a batch where they wait. Arguments: batch, number of the chunk, how many of its jobs
-- were fed before; '1' if these are its last; then for each: id, custom id, priority, payload, its digest, cost, rejection,
-- traceparent.
-- Answers 0 when others were faster: nothing was done.
local batch = arg(1)
local h = redis.call('HMGET', batch_key(batch), 'owner', 'chunk', 'fed')
if not h[1] or (h[2] or '0') ~= arg(2) or (h[3] or '0') ~= arg(3) then return 0 end
local n, sealed = 0, redis.call('HGET', batch_key(batch), 'sealed')
for i = 5, num_args(), 8 do
  n = n + 1
  add_job(batch, arg(i), arg(i + 1), arg(i + 2), arg(i + 3), arg(i + 4), arg(i + 5), arg(i + 6),
    arg(i + 7))
end
if sealed then redis.call('HSET', batch_key(batch), 'sealed', sealed) end
redis.call('HINCRBY', batch_key(batch), 'chunked', -n)
redis.call('HINCRBY', P .. 'totals', 'chunked', -n)
if redis.call('HINCRBY', P .. 'chunked', h[1], -n) <= 0 then redis.call('HDEL', P .. 'chunked', h[1]) end
redis.call('HINCRBY', batch_key(batch), 'fed', n)
if arg(4) == '1' then
  redis.call('LTRIM', chunks_key(batch), 1, -1)
  redis.call('HINCRBY', batch_key(batch), 'chunk', 1)
  redis.call('HSET', batch_key(batch), 'fed', 0)
  if redis.call('EXISTS', chunks_key(batch)) == 0 then
    redis.call('ZREM', P .. 'chunks', batch)
  else
    redis.call('ZADD', P .. 'chunks', 'XX', redis.call('HINCRBY', P .. 'clock', 'place', 1), batch)
  end
end
if num_live(batch) == 0 then -- all that was left was rejected or cancelled, so that nothing else will end the batch
  redis.call('HSET', batch_key(batch), 'ended', now)
  keep_until_expiry(batch)
end
return 1
