-- Hands in jobs. Arguments: batch, then for each: id, custom id, priority, payload, its digest, rejection.
local batch, out = arg(1), {}
if redis.call('EXISTS', batch_key(batch)) == 0 then return 'unknown' end

local function admit(id, custom_id, priority, payload, digest, rejection)
  local known = redis.call('HGET', job_key(id), 'payload_sha256')
  if known then return known == digest and 'known' or 'conflict' end
  local waiting = tonumber(redis.call('HGET', P .. 'totals', 'queued') or 0)
  if rejection == '' and waiting >= MAX_BACKLOG then return 'full' end
  redis.call('HSET', job_key(id), 'batch', batch, 'custom', custom_id, 'priority', priority, 'payload', payload,
    'payload_sha256', digest, 'epoch', 0, 'attempts', 0, 'crashes', 0, 'created', now)
  redis.call('RPUSH', jobs_key(batch), id)
  redis.call('HDEL', batch_key(batch), 'sealed')
  if rejection ~= '' then
    redis.call('HSET', job_key(id), 'error', rejection, 'code', 'INVALID_ARGUMENT')
    move(id, batch, false, 'failed')
  elseif is_cancelled(batch) then
    move(id, batch, false, 'cancelled')
  else
    move(id, batch, false, 'queued')
    enqueue(id, priority)
  end
  return 'added'
end

for i = 2, num_args(), 6 do
  out[#out + 1] = admit(arg(i), arg(i + 1), arg(i + 2), arg(i + 3), arg(i + 4), arg(i + 5))
end
return out
