-- Hands in jobs. Arguments: batch, how many jobs of its owner may wait; then for each: id, custom id, priority, payload,
-- its digest, cost, rejection, traceparent.
local batch, out = arg(1), {}
if redis.call('EXISTS', batch_key(batch)) == 0 then return 'unknown' end

local room = room_of(owner_of(batch), tonumber(arg(2)))

local function admit(id, custom_id, priority, payload, digest, cost, rejection, trace)
  local known = redis.call('HGET', job_key(id), 'payload_sha256')
  if known then return known == digest and 'known' or 'conflict' end
  local will_wait = rejection == '' and not is_cancelled(batch)
  if rejection == '' and is_full() then return 'full' end
  if will_wait and room <= 0 then return 'over_quota' end
  redis.call('HSET', job_key(id), 'batch', batch, 'custom', custom_id, 'priority', priority, 'payload', payload,
    'payload_sha256', digest, 'epoch', 0, 'attempts', 0, 'crashes', 0, 'created', now)
  if tonumber(cost) > 1 then redis.call('HSET', job_key(id), 'cost', cost) end
  if trace ~= '' then redis.call('HSET', job_key(id), 'trace', trace) end
  redis.call('RPUSH', jobs_key(batch), id)
  redis.call('HDEL', batch_key(batch), 'sealed')
  if rejection ~= '' then
    redis.call('HSET', job_key(id), 'error', rejection, 'code', 'INVALID_ARGUMENT')
    move(id, batch, false, 'failed')
  elseif will_wait then
    move(id, batch, false, 'queued')
    enqueue(id, false)
    room = room - 1
  else
    move(id, batch, false, 'cancelled')
  end
  return 'added'
end

for i = 3, num_args(), 8 do
  out[#out + 1] = admit(arg(i), arg(i + 1), arg(i + 2), arg(i + 3), arg(i + 4), arg(i + 5), arg(i + 6), arg(i + 7))
end
return out
