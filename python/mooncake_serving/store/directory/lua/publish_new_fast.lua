-- Publish objects that are being put into a pool, if no other pool has them and no one else writes
-- them. One byte per key: 0 if it is published, 1 if not; 2 if the command is too late, and nothing
-- is published: whoever has sent it has given up.
--
-- A writer waits for this. So what is usual, that no one has or claims any of them, comes first,
-- before functions are made that take longer than all of it.
local prefix, packed = KEYS[1], ARGV[3]
local count = #packed / 16
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if now > tonumber(ARGV[2]) then return string.rep('\2', count) end
local pool = redis.call('HGET', prefix .. 'names', ARGV[1])
local till = pool and redis.call('ZSCORE', prefix .. 'served', pool)
if not till or tonumber(till) <= now then return string.rep('\1', count) end
local keys, names = {}, {}
for i = 1, count do
  local key = string.sub(packed, 16 * i - 15, 16 * i)
  keys[i] = key
  names[i] = prefix .. 'o' .. key
  names[count + i] = prefix .. 'c' .. key
  names[2 * count + i] = prefix .. 'r' .. key
end
local said, is_known, marks = redis.call('MGET', unpack(names)), false, {}
for i = 1, 2 * count do is_known = is_known or said[i] end
if not is_known then
  local values = {}
  for i = 1, count do
    values[2 * i - 1], values[2 * i] = names[i], pool .. ' '
    if said[2 * count + i] then marks[#marks + 1] = names[2 * count + i] end
  end
  redis.call('MSET', unpack(values))
  redis.call('SADD', prefix .. 'p' .. pool, unpack(keys))
  if #marks > 0 then redis.call('DEL', unpack(marks)) end
  return string.rep('\0', count)
end
