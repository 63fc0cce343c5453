-- Answers: queued, delayed, suspects that wait, running, dead; and for how many ms the oldest job has waited its turn.
local n = redis.call('HMGET', P .. 'totals', 'queued', 'running', 'dead', 'chunked')
local oldest = now

-- What was delivered lies ahead of what was not.
local function look(name)
  local waiting, pending = num_waiting(name)
  if waiting == 0 then return end
  local entry = redis.call('XRANGE', stream_key(name), '-', '+', 'COUNT', pending + 1)[pending + 1]
  local created = redis.call('HGET', job_key(entry[2][2]), 'created')
  oldest = math.min(oldest, tonumber(created or now))
end

look('suspects')
look('again')
for _, priority in ipairs(PRIORITIES) do
  look(priority)
  for _, owner in ipairs(redis.call('ZRANGE', turns_key(priority), 0, -1)) do
    look(again_name(priority, owner))
    look(waiting_name(priority, owner))
  end
end
return { tonumber(n[1] or 0) + tonumber(n[4] or 0), redis.call('ZCARD', P .. 'delayed'), (num_waiting('suspects')), tonumber(n[2] or 0),
  tonumber(n[3] or 0), math.max(0, now - oldest) }
