-- Queues ended jobs of a part of a batch again, while there is room. Arguments: batch, position, number of jobs to look
-- at, how many jobs of its owner may wait, states.
-- Answers: where to go on, 0 at the end; how many were queued; and what kept the next one from it, if anything did.
local batch, first, size = arg(1), tonumber(arg(2)), tonumber(arg(3))
if redis.call('EXISTS', batch_key(batch)) == 0 then return 'unknown' end
if is_cancelled(batch) and tonumber(redis.call('HGET', batch_key(batch), 'chunked') or 0) > 0 then
  return { 0, 0, 'outside' } -- what waits there is cancelled as it is brought in, and is not to come to life by this
end
local room = room_of(owner_of(batch), tonumber(arg(4)))
local wanted = {}
for i = 5, num_args() do wanted[arg(i)] = true end
local ids = redis.call('LRANGE', jobs_key(batch), first, first + size - 1)
local n = 0
for _, id in ipairs(ids) do
  local state = redis.call('HGET', job_key(id), 'state')
  if wanted[state] and not (state == 'cancelled' and redis.call('HGET', job_key(id), 'at')) then -- that is put aside
    if is_full() then return { 0, n, 'full' } end
    if room <= 0 then return { 0, n, 'over_quota' } end
    redis.call('HDEL', batch_key(batch), 'cancel', 'obstacle', 'obstacle_at') -- as of what they had before
    count_anew(id, 'error', '', 'code', '')
    move(id, batch, state, 'queued')
    enqueue(id, false)
    room, n = room - 1, n + 1
  end
end
return { #ids == size and first + size or 0, n }
