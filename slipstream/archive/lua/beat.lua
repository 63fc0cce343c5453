-- Renews leases. Arguments, for each: job, worker, epoch, progress.
local out = {}
hear()
if num_args() > 0 then show_alive(arg(2)) end

local function beat(id, worker, epoch, progress)
  local same, state, batch, entry = holder(id, worker, epoch)
  if not same or state ~= 'running' then
    absolve(id, worker, epoch)
    if suspect_of(worker) == id then redis.call('DEL', P .. 'w:' .. worker) end
    return 'lost'
  end
  renew(entry)
  if suspect_of(worker) == id then
    redis.call('PEXPIRE', P .. 'w:' .. worker, DAY)
    redis.call('PEXPIRE', P .. 'suspect', DAY)
  end
  if progress ~= '' then redis.call('HSET', job_key(id), 'progress', progress) end
  return is_cancelled(batch) and 'cancel' or 'keep'
end

for i = 1, num_args(), 4 do out[#out + 1] = beat(arg(i), arg(i + 1), arg(i + 2), arg(i + 3)) end
return out
