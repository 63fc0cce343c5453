-- Keeps a note: what a job makes on the way to its last part, for its later runs alone. Arguments: job, worker, epoch, name, the
-- note behind its digest, most bytes of the job's parts and notes. A job that makes notes gets on, as one that makes parts.
local id, name, note = arg(1), arg(4), arg(5)
local same, state, batch = holder(id, arg(2), arg(3))
if not same or state ~= 'running' then return 'lost' end
local meta = redis.call('HMGET', meta_key(id), 'bytes', 'notes', 'note_bytes')
if not meta[1] then return 'outside' end
local old = redis.call('HGET', parts_key(id), note_field(name))
if old == note then return 'known' end
local more = #note - #(old or '')
if tonumber(meta[1]) + more > tonumber(arg(6)) then return 'full' end
redis.call('HSET', parts_key(id), note_field(name), note)
if not old then redis.call('HSET', meta_key(id), 'notes', (meta[2] or '') .. name .. ' ') end
redis.call('HINCRBY', meta_key(id), 'note_bytes', more)
grow_parts(id, batch, more)
count_anew(id)
return 'kept'
