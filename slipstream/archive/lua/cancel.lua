-- Cancels a part of a batch; one that is completed stays so. Arguments: batch, position, number of jobs to look at.
-- Answers: where to go on, 0 at the end; how many were cancelled or will be.
local batch, first, size = arg(1), tonumber(arg(2)), tonumber(arg(3))
if redis.call('EXISTS', batch_key(batch)) == 0 then return 'unknown' end
if redis.call('HGET', batch_key(batch), 'sealed') and num_live(batch) == 0 then return { 0, 0 } end
redis.call('HSET', batch_key(batch), 'cancel', '1')
local ids = redis.call('LRANGE', jobs_key(batch), first, first + size - 1)
local n = 0
for _, id in ipairs(ids) do
  local h = redis.call('HMGET', job_key(id), 'state', 'entry')
  if is_live(h[1]) then n = n + 1 end
  if h[1] == 'queued' then
    redis.call('ZREM', P .. 'delayed', id)
    move(id, batch, 'queued', 'cancelled')
    if h[2] ~= '' then drop(h[2]) end
  end
end
return { #ids == size and first + size or 0, n }
