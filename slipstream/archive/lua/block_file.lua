-- The batch's next file cannot be written now; others go on. Arguments: batch, number of the file, how many jobs, for how
-- many ms. Answers 0 when that is not the plan any more: somebody else wrote it.
local batch = arg(1)
make_way()
if redis.call('HGET', batch_key(batch), 'plan') ~= arg(2) .. ' ' .. arg(3) then return 0 end
redis.call('HSET', batch_key(batch), 'blocked', now + tonumber(arg(4)))
return 1
