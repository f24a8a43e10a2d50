-- Publish objects of a pool, but no copies of removed objects.
local pool, keys = number_of(ARGV[1]), keys_in(ARGV[2])
if not pool then return string.rep('\2', #keys) end
local removed, answers, listed = read(named('r', keys)), {}, {}
for i = 1, #keys do
  local is_refused = is_copy and removed[i]
  answers[i] = is_refused and '\1' or '\0'
  if not is_refused then listed[#listed + 1] = keys[i] end
end
local objects = named('o', listed)
change(objects, read(objects), function(pools) return with(pool, pools) end)
call_with_all(listed, 'SADD', prefix .. 'p' .. pool)
call_with_all(named('c', listed), 'DEL')
call_with_all(named('r', listed), 'DEL')
return table.concat(answers)
