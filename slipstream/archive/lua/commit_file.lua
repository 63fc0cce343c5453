-- A result file is there: from now on it is where its jobs are. Arguments: batch, number of the file, how many jobs, what
-- is to be known of it. Answers 0 when that is not the plan any more: somebody else committed it.
local batch = arg(1)
make_way()
if redis.call('HGET', batch_key(batch), 'plan') ~= arg(2) .. ' ' .. arg(3) then return 0 end
for _, entry in ipairs(redis.call('LRANGE', ended_key(batch), 0, tonumber(arg(3)) - 1)) do
  redis.call('SETBIT', outside_key(batch), string.match(entry, '^%d+'), 1)
end
redis.call('RPUSH', P .. 'b:' .. batch .. ':files', arg(4))
redis.call('HDEL', batch_key(batch), 'plan')
redis.call('HSET', batch_key(batch), 'freeing', arg(3))
return 1
