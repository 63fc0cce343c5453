-- Keeps a caption for its near-duplicates, and of those of its set the latest so many, for as long as a batch.
-- Arguments: set, the entry behind its digest, how many.
local key = P .. 'k:' .. arg(1)
redis.call('XADD', key, 'MAXLEN', arg(3), '*', 'e', arg(2))
redis.call('PEXPIRE', key, RETENTION)
return 1
