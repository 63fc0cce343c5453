-- Answers how many workers have jobs that run.
local seen, num_busy = {}, 0

-- What was delivered lies ahead of what was not.
local function look(name)
  local _, pending = num_waiting(name)
  if pending == 0 then return end
  for _, entry in ipairs(redis.call('XRANGE', stream_key(name), '-', '+', 'COUNT', pending)) do
    local job = redis.call('HMGET', job_key(entry[2][2]), 'state', 'worker')
    if job[1] == 'running' and not seen[job[2]] then
      seen[job[2]] = true
      num_busy = num_busy + 1
    end
  end
end

for _, name in ipairs(streams_with_leases()) do look(name) end
return num_busy
