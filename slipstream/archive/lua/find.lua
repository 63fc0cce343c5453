-- A committed result. Argument: content key. Answers: the result and its digest, or nothing.
local id = redis.call('GET', P .. 'r:' .. arg(1))
if not id then return {} end
local h = redis.call('HMGET', job_key(id), 'result', 'result_sha256')
return { h[1] or '', h[2] or '' }
