-- Where a job is that has no record here. Arguments: batch, job. Answers its position if it has parts, which are in a result
-- file, or '' if it has none.
local position = redis.call('HGET', P .. 'b:' .. arg(1) .. ':where', arg(2))
if position then return position end
local is_id = #arg(2) == 32 and string.match(arg(2), '^%x+$') -- callers may have asked for anything
return is_id and named(arg(1), arg(2), '00000000') and '' or 'unknown'
