-- Parts of a job in order. Arguments: batch, job, number to begin with, how many at most, and after how many bytes to end.
-- Answers: where to go on, 0 at the end; then number and part of each, a part behind its digest.
local batch, id, at, limit, room = arg(1), arg(2), tonumber(arg(3)), tonumber(arg(4)), tonumber(arg(5))
if redis.call('HGET', job_key(id), 'batch') ~= batch then return 'unknown' end
local out = { 0 }
for _, number in ipairs(redis.call('ZRANGEBYSCORE', done_key(id), at, '+inf', 'LIMIT', 0, limit + 1)) do
  if #out > limit or room <= 0 then
    out[1] = tonumber(number)
    break
  end
  local part = redis.call('HGET', parts_key(id), number) or ''
  out[#out + 1] = { tonumber(number), part }
  room = room - #part
end
return out
