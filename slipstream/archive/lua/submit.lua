-- Hands in jobs. Arguments: batch, how many jobs of its owner may wait; then for each: id, custom id, priority, payload,
-- its digest, cost, rejection, code of that, traceparent. 'outside': there is no room for it, or jobs before it wait outside.
local batch, out = arg(1), {}
if redis.call('EXISTS', batch_key(batch)) == 0 then return 'unknown' end

local SMALL_BATCH = 1000

-- Half of the room is for what the feeder brings; the rest is for those who hand in little.
local function is_outside()
  if BUDGET == 0 then return false end
  local h = redis.call('HMGET', batch_key(batch), 'chunked', 'n:queued')
  local held = held_bytes()
  return tonumber(h[1] or 0) > 0 or held >= BUDGET or (held >= BUDGET / 2 and tonumber(h[2] or 0) >= SMALL_BATCH)
end

local room = room_of(owner_of(batch), tonumber(arg(2)))
local outside, has_names, is_open = is_outside(), redis.call('EXISTS', names_key(batch)) == 1, false

local function admit(id, custom_id, priority, payload, digest, cost, rejection, code, trace)
  local known = redis.call('HGET', job_key(id), 'payload_sha256')
  if known then return known == digest and 'known' or 'conflict' end
  local before = has_names and named(batch, id, digest)
  if before then return before end
  if outside then return 'outside' end
  local will_wait = rejection == '' and not is_cancelled(batch)
  if rejection == '' and is_full() then return 'full' end
  if will_wait and room <= 0 then return 'over_quota' end
  add_job(batch, id, custom_id, priority, payload, digest, cost, rejection, code, trace)
  is_open = true
  if will_wait then room = room - 1 end
  return 'added'
end

for i = 3, num_args(), 9 do
  out[#out + 1] = admit(unpack(ARGV, FIRST_ARG + i, FIRST_ARG + i + 8))
end
if is_open then redis.call('HDEL', batch_key(batch), 'sealed') end
return out
