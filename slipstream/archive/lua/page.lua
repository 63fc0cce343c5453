-- Jobs of a batch in order. Arguments: batch, position, limit, number of jobs to look at, states (none: all).
-- Answers: where to go on, 0 at the end; where this page ends; then the jobs. Of a job that is in a result file only its position.
local batch, at, limit, size = arg(1), tonumber(arg(2)), tonumber(arg(3)), tonumber(arg(4))
if redis.call('EXISTS', batch_key(batch)) == 0 then return 'unknown' end
local wanted, all = {}, num_args() < 5
for i = 5, num_args() do wanted[arg(i)] = true end
local has_files = redis.call('EXISTS', outside_key(batch)) == 1
local swept = tonumber(redis.call('HGET', batch_key(batch), 'swept') or 0)
local ids = redis.call('LRANGE', jobs_key(batch), at, at + size - 1)
local out = { 0, 0 }
for _, id in ipairs(ids) do
  if #out >= limit + 2 then break end
  at = at + 1
  if has_files and redis.call('GETBIT', outside_key(batch), swept + at - 1) == 1 then
    if all or wanted.done or wanted.cancelled then out[#out + 1] = { swept + at - 1 } end
  elseif all or wanted[redis.call('HGET', job_key(id), 'state')] then
    out[#out + 1] = job_row(id)
  end
end
if at < redis.call('LLEN', jobs_key(batch)) then out[1] = at end
out[2] = at
return out
