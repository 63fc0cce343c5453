-- Keeps a checkpoint. Arguments: job, worker, epoch, checkpoint.
local same, state = holder(arg(1), arg(2), arg(3))
if not same or state ~= 'running' then return 0 end
redis.call('HSET', job_key(arg(1)), 'checkpoint', arg(4))
return 1
