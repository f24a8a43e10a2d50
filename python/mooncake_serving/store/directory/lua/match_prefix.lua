-- Reads few keys at first, then four times as many each time: a prefix may end soon.
local keys, from, size = ARGV[1], 1, 16 * 16
while from <= #keys do
  local part = keys_in(string.sub(keys, from, from + size - 1))
  if not find(read(named('o', part)), true) then break end
  from, size = from + size, 4 * size
end
return answer()
