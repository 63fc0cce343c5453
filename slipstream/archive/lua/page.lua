-- Jobs of a batch in order. Arguments: batch, position, limit, number of jobs to look at, states (none: all).
-- Answers: where to go on, 0 at the end; then the jobs.
local batch, at, limit, size = arg(1), tonumber(arg(2)), tonumber(arg(3)), tonumber(arg(4))
if redis.call('EXISTS', batch_key(batch)) == 0 then return 'unknown' end
local wanted, all = {}, num_args() < 5
for i = 5, num_args() do wanted[arg(i)] = true end
local ids = redis.call('LRANGE', jobs_key(batch), at, at + size - 1)
local out = { 0 }
for _, id in ipairs(ids) do
  if #out > limit then break end
  at = at + 1
  local state = redis.call('HGET', job_key(id), 'state')
  if all or wanted[state] then
    local h = redis.call('HMGET', job_key(id), 'state', 'custom', 'payload', 'result', 'result_sha256', 'error', 'code',
      'worker', 'epoch', 'attempts', 'crashes', 'progress', 'created', 'started', 'ended')
    for i = 1, 15 do h[i] = h[i] or '' end
    h[16] = redis.call('HGET', meta_key(id), 'total') or 0
    h[17] = redis.call('ZCARD', done_key(id))
    out[#out + 1] = { id, unpack(h) }
  end
end
if at < redis.call('LLEN', jobs_key(batch)) then out[1] = at end
return out
