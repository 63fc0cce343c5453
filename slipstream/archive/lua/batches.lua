-- Ids of batches, the latest first. Arguments: limit, and an owner if only theirs are wanted.
local key = num_args() > 1 and P .. 'o:' .. arg(2) or P .. 'batches'
return redis.call('ZREVRANGE', key, 0, tonumber(arg(1)) - 1)
