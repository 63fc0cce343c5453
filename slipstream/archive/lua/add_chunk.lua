-- Takes in jobs that wait outside, in an object that is there. Arguments: batch, how many jobs of its owner may wait, the
-- object; then for each job of it: id, digest of the payload. Answers what became of each.
local batch, object = arg(1), arg(3)
if redis.call('EXISTS', batch_key(batch)) == 0 then return 'unknown' end
local owner = owner_of(batch)
local room, n, mask, out = room_of(owner, tonumber(arg(2))), 0, {}, {}

local function admit(id, digest)
  local known = redis.call('HGET', job_key(id), 'payload_sha256')
  if known then return known == digest and 'known' or 'conflict' end
  local before, neighbours = named(batch, id, digest)
  if before then return before end
  if is_full(n) then return 'full' end
  if n >= room then return 'over_quota' end
  remember(batch, id, digest, neighbours)
  n = n + 1
  return 'added'
end

for i = 4, num_args(), 2 do
  local said = admit(arg(i), arg(i + 1))
  out[#out + 1] = said
  mask[#mask + 1] = said == 'added' and '1' or '0'
end
if n == 0 then return out end
redis.call('RPUSH', chunks_key(batch), object .. ' ' .. n .. ' ' .. (n == #mask and '' or table.concat(mask)))
redis.call('ZADD', P .. 'chunks', 'NX', redis.call('HINCRBY', P .. 'clock', 'place', 1), batch)
add(batch_key(batch), 'chunked', n)
add(P .. 'totals', 'chunked', n)
add(P .. 'chunked', owner, n)
redis.call('HDEL', batch_key(batch), 'sealed')
changed[batch] = true
return out
