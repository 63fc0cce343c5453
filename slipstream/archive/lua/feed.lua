-- Puts jobs of the first chunk of a batch where they wait. Arguments: batch, number of the chunk, how many of its jobs
-- were fed before; '1' if these are its last; how many of a cancelled batch nobody can read any more: they end without a
-- record; then for each: id, custom id, priority, payload, its digest, cost, rejection, code of that, traceparent.
-- Answers 0 when others were faster, or the batch goes on: nothing was done.
local batch, lost = arg(1), tonumber(arg(5))
local h = redis.call('HMGET', batch_key(batch), 'owner', 'chunk', 'fed')
if not h[1] or (h[2] or '0') ~= arg(2) or (h[3] or '0') ~= arg(3) then return 0 end
if lost > 0 and not is_cancelled(batch) then return 0 end
local n = lost
add(batch_key(batch), 'n:cancelled', lost)
for i = 6, num_args(), 9 do
  n = n + 1
  add_job(batch, unpack(ARGV, FIRST_ARG + i, FIRST_ARG + i + 8))
end
add(batch_key(batch), 'chunked', -n)
add(P .. 'totals', 'chunked', -n)
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
changed[batch] = true -- where all that was left was rejected or cancelled nothing else will end the batch
return 1
