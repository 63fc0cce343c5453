-- Captions of a set that were kept behind a place. Arguments: set, place or '', how many at most.
-- Answers: the place of each, and the entry behind its digest.
local after = arg(2) == '' and '-' or '(' .. arg(2)
local found = {}
for i, entry in ipairs(redis.call('XRANGE', P .. 'k:' .. arg(1), after, '+', 'COUNT', arg(3))) do
  found[i] = { entry[1], entry[2][2] }
end
return found
