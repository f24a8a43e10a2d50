"""What a directory does in Redis: scripts, of which each is atomic.

Names begin with the cluster's in braces, which keeps all of them on one node of a Redis Cluster.
Behind it:

    o<key>    set: numbers of pools that have the object
    c<key>    string, with a time to live: number of the member that has a claim to it
    p<pool>   set: keys of what the pool of this number has
    alive     sorted set: seats, by when they run out, in milliseconds of the server's clock
    members   hash: of a member's name, its seat, the server that it joined, and its entry
    pools     hash: of a pool's number, its name; dead ones too, until they are swept
    numbers   string: the last number that was given

A seat is "<member> <pool> <name of the pool>", with numbers, and pool 0 for none. Members and pools
have new numbers whenever they come to life, so nothing that was known of the dead is theirs.

Keys come as one string, 16 bytes each: thousands of arguments would take longer to read than to do.
"""

from .redis_script import Script

PRELUDE = """
local prefix = KEYS[1]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function key_at(keys, i) return string.sub(keys, 16 * i - 15, 16 * i) end

-- A restart changes the one for sure, a failover the other.
local function server()
  local info = redis.call('INFO', 'server', 'replication')
  return string.match(info, 'run_id:(%w+)') .. string.match(info, 'master_replid:(%w+)')
end

local function is_alive(seat)
  local till = redis.call('ZSCORE', prefix .. 'alive', seat)
  return till and tonumber(till) > now
end

-- The seat of a living member, and the server that it joined.
local function seat_of(name)
  local record = redis.call('HGET', prefix .. 'members', name)
  if not record then return nil end
  local seat, joined = unpack(cmsgpack.unpack(record))
  if is_alive(seat) then return seat, joined end
end

local function parts(seat) return string.match(seat, '^(%d+) (%d+) (.*)$') end

local function sit(name, seat, entry, ttl)
  redis.call('ZADD', prefix .. 'alive', now + ttl, seat)
  redis.call('HSET', prefix .. 'members', name, cmsgpack.pack({seat, server(), entry}))
end

-- Who lives: members by number, names of pools by number, numbers of pools by name.
local function living()
  local members, names, numbers = {}, {}, {}
  for _, seat in ipairs(redis.call('ZRANGEBYSCORE', prefix .. 'alive', '(' .. now, '+inf')) do
    local member, pool, name = parts(seat)
    members[member] = true
    if pool ~= '0' then names[pool], numbers[name] = name, pool end
  end
  return members, names, numbers
end

-- Lua's stack has room for some thousand arguments.
local function call_with_all(list, ...)
  for i = 1, #list, 1000 do
    local arguments = {...}
    for j = i, math.min(i + 999, #list) do arguments[#arguments + 1] = list[j] end
    redis.call(unpack(arguments))
  end
end
"""

JOIN = Script(
    PRELUDE
    + """
local name, pool, entry, ttl = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local seat = seat_of(name)
if seat and select(3, parts(seat)) ~= pool then
  redis.call('ZREM', prefix .. 'alive', seat)
  seat = nil
end
if not seat then
  local number = '0'
  if pool ~= '' then
    local _, _, numbers = living()
    number = numbers[pool]
    if not number then
      number = tostring(redis.call('INCR', prefix .. 'numbers'))
      redis.call('HSET', prefix .. 'pools', number, pool)
    end
  end
  seat = redis.call('INCR', prefix .. 'numbers') .. ' ' .. number .. ' ' .. pool
end
sit(name, seat, entry, ttl)
return 1
"""
)

RENEW = Script(
    PRELUDE
    + """
local name, pool, entry, ttl = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local seat, joined = seat_of(name)
if not seat or joined ~= server() or select(3, parts(seat)) ~= pool then return 0 end
sit(name, seat, entry, ttl)
return 1
"""
)

LEAVE = Script(
    PRELUDE
    + """
local seat = seat_of(ARGV[1])
if seat then redis.call('ZREM', prefix .. 'alive', seat) end
redis.call('HDEL', prefix .. 'members', ARGV[1])
return 1
"""
)

MEMBERS = Script(
    PRELUDE
    + """
local entries = {}
for _, record in ipairs(redis.call('HVALS', prefix .. 'members')) do
  local seat, _, entry = unpack(cmsgpack.unpack(record))
  if is_alive(seat) then entries[#entries + 1] = entry end
end
return entries
"""
)

CLAIM = Script(
    PRELUDE
    + """
local function is_held(key, names)
  for _, pool in ipairs(redis.call('SMEMBERS', prefix .. 'o' .. key)) do
    if names[pool] then return true end
  end
  return false
end

local seat, ttl, keys = seat_of(ARGV[1]), ARGV[2], ARGV[3]
if not seat then return false end
local number = parts(seat)
local members, names = living()
local answers = {}
for i = 1, #keys / 16 do
  local key = key_at(keys, i)
  if is_held(key, names) then
    answers[i] = '1'
  else
    local claimant = redis.call('GET', prefix .. 'c' .. key)
    if claimant and claimant ~= number and members[claimant] then
      answers[i] = '2'
    else
      redis.call('SET', prefix .. 'c' .. key, number, 'PX', ttl)
      answers[i] = '0'
    end
  end
end
return table.concat(answers)
"""
)

PUBLISH = Script(
    PRELUDE
    + """
local pool, keys = ARGV[1], ARGV[2]
local _, _, numbers = living()
local number = numbers[pool]
if not number then return 0 end
local objects, claims = {}, {}
for i = 1, #keys / 16 do
  local key = key_at(keys, i)
  redis.call('SADD', prefix .. 'o' .. key, number)
  objects[i], claims[i] = key, prefix .. 'c' .. key
end
call_with_all(objects, 'SADD', prefix .. 'p' .. number)
call_with_all(claims, 'DEL')
return 1
"""
)

WITHDRAW = Script(
    PRELUDE
    + """
local pool, keys = ARGV[1], ARGV[2]
local _, _, numbers = living()
local number = numbers[pool]
if not number then return 0 end
local objects = {}
for i = 1, #keys / 16 do
  local key = key_at(keys, i)
  redis.call('SREM', prefix .. 'o' .. key, number)
  objects[i] = key
end
call_with_all(objects, 'SREM', prefix .. 'p' .. number)
return 1
"""
)

ABANDON = Script(
    PRELUDE
    + """
local seat, keys = seat_of(ARGV[1]), ARGV[2]
if not seat then return 0 end
local number = parts(seat)
for i = 1, #keys / 16 do
  local claim = prefix .. 'c' .. key_at(keys, i)
  if redis.call('GET', claim) == number then redis.call('DEL', claim) end
end
return 1
"""
)

# What living pools have of some keys, as three strings, for a client reads dozens for longer: names
# of pools; of each the bytes of its name and how many keys it has; their indices, 4 bytes each. And
# the indices by the number of the pool. Of a prefix nothing is looked for behind a key that no pool
# has.
_FIND = (
    PRELUDE
    + """
local function find(keys, is_prefix)
  local _, names = living()
  local found, call, objects = {}, redis.call, prefix .. 'o'
  for i = 1, #keys / 16 do
    local is_there, index = false, struct.pack('<I4', i - 1)
    local pools = call('SMEMBERS', objects .. key_at(keys, i))
    for j = 1, #pools do
      local pool = pools[j]
      if names[pool] then
        is_there = true
        local indices = found[pool]
        if indices then
          indices[#indices + 1] = index
        else
          found[pool] = {index}
        end
      end
    end
    if is_prefix and not is_there then break end
  end
  local held_by, sizes, held = {}, {}, {}
  for pool, indices in pairs(found) do
    held_by[#held_by + 1] = names[pool]
    sizes[#sizes + 1] = struct.pack('<I4I4', #names[pool], #indices)
    held[#held + 1] = table.concat(indices)
  end
  return {table.concat(held_by), table.concat(sizes), table.concat(held)}, found
end
"""
)

HOLDERS = Script(_FIND + "return (find(ARGV[1], false))\n")

MATCH_PREFIX = Script(_FIND + "return (find(ARGV[1], true))\n")

WITHDRAW_ALL = Script(
    _FIND
    + """
local keys = ARGV[1]
local answer, found = find(keys, false)
for pool in pairs(found) do
  local objects = {}
  for i = 1, #keys / 16 do
    local key = key_at(keys, i)
    redis.call('SREM', prefix .. 'o' .. key, pool)
    objects[i] = key
  end
  call_with_all(objects, 'SREM', prefix .. 'p' .. pool)
end
return answer
"""
)

KEYS_OF = Script(
    PRELUDE
    + """
local pool, cursor, count = ARGV[1], ARGV[2], ARGV[3]
local _, _, numbers = living()
if not numbers[pool] then return {'0', ''} end
local page = redis.call('SSCAN', prefix .. 'p' .. numbers[pool], cursor, 'COUNT', count)
return {page[1], table.concat(page[2])}
"""
)

NUM_OBJECTS = Script(
    PRELUDE
    + """
local _, _, numbers = living()
if not numbers[ARGV[1]] then return 0 end
return redis.call('SCARD', prefix .. 'p' .. numbers[ARGV[1]])
"""
)

# Forgets some objects; of pools that are done the names, behind whether there is more to do.
SWEEP = Script(
    PRELUDE
    + """
local left = tonumber(ARGV[1])
redis.call('ZREMRANGEBYSCORE', prefix .. 'alive', '-inf', now)
local members = redis.call('HGETALL', prefix .. 'members')
for i = 1, #members, 2 do
  local seat = unpack(cmsgpack.unpack(members[i + 1]))
  if not is_alive(seat) then redis.call('HDEL', prefix .. 'members', members[i]) end
end
local _, names = living()
local pools = redis.call('HGETALL', prefix .. 'pools')
local answer = {0}
for i = 1, #pools, 2 do
  local pool = pools[i]
  if not names[pool] then
    local keys = redis.call('SPOP', prefix .. 'p' .. pool, left)
    for _, key in ipairs(keys) do redis.call('SREM', prefix .. 'o' .. key, pool) end
    if #keys == left then
      answer[1] = 1
      return answer
    end
    left = left - #keys
    redis.call('HDEL', prefix .. 'pools', pool)
    answer[#answer + 1] = pools[i + 1]
  end
end
return answer
"""
)
