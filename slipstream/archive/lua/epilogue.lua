-- Comes behind every other script, which is the function `script` by then.
local ok, answer = pcall(script)
local settled, wrong = pcall(settle)
if not ok then error(answer, 0) end
if not settled then error(wrong, 0) end
return answer
