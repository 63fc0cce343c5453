-- Jobs by their ids, each with its content key at the end. Arguments: who compacts, after how many bytes to end, ids.
-- Answers the first of them, at least one.
local room, out = tonumber(arg(2)), {}
make_way()
elected('compactor', arg(1))
for i = 3, num_args() do
  if room <= 0 then break end
  local row = job_row(arg(i))
  row[#row + 1] = redis.call('HGET', job_key(arg(i)), 'content') or ''
  out[#out + 1] = row
  room = room - #row[4] - #row[5]
end
return out
