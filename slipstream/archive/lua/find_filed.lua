-- Where the result of a content may lie that has left for a result file. Argument: content key. Answers batch and position,
-- or nothing; what lies there must be looked at, as an entry has a part of the key only.
local field, name = content_name(arg(1))
local entries = redis.call('HGET', P .. 'contents', field) or ''
local at = entry_at(entries, name, 14)
if not at then return {} end
local number, position = struct.unpack('>I4I4', entries, at + 6)
local batch = redis.call('HGET', P .. 'filed', number)
return batch and { batch, position } or {}
