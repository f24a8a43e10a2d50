"""What a directory does in Redis: scripts, of which each is atomic.

Names begin with the cluster's in braces, which keeps all of them on one node of a Redis Cluster.
Behind it:

    o<key>    string: numbers of the pools that have the object, each with a space behind it
    c<key>    string, with a time to live: number of the member that has a claim to it
    p<pool>   set: keys of what the pool of this number has
    alive     sorted set: seats, by when they run out, in milliseconds of the server's clock
    members   hash: of a member's name, its seat, the server that it joined, and its entry
    pools     hash: of a pool's number, its name; dead ones too, until they are swept
    numbers   string: the last number that was given

A seat is "<member> <pool> <name of the pool>", with numbers, and pool 0 for none. Members and pools
have new numbers whenever they come to life, so nothing that was known of the dead is theirs.

Keys come as one string, 16 bytes each: thousands of arguments would take longer to read than to do.
What is said of them is read by one command, and written by one. Of most keys of a prompt it is the
same: what that means is found once.
"""

from .redis_script import Script

PRELUDE = """
local prefix = KEYS[1]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

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

-- Who lives: members by number, names of pools by number, numbers of pools by name.
local alive
local function living()
  if alive then return alive end
  alive = {members = {}, names = {}, numbers = {}}
  for _, seat in ipairs(redis.call('ZRANGEBYSCORE', prefix .. 'alive', '(' .. now, '+inf')) do
    local member, pool, name = parts(seat)
    alive.members[member] = true
    if pool ~= '0' then alive.names[pool], alive.numbers[name] = name, pool end
  end
  return alive
end
"""

_SIT = (
    PRELUDE
    + """
-- A restart changes the one for sure, a failover the other.
local function server()
  local info = redis.call('INFO', 'server', 'replication')
  return string.match(info, 'run_id:(%w+)') .. string.match(info, 'master_replid:(%w+)')
end

local function sit(name, seat, entry, ttl)
  redis.call('ZADD', prefix .. 'alive', now + ttl, seat)
  redis.call('HSET', prefix .. 'members', name, cmsgpack.pack({seat, server(), entry}))
end
"""
)

JOIN = Script(
    _SIT
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
    number = living().numbers[pool]
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
    _SIT
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

# What is done with keys, at most 4096 of them: Lua's stack has room for some thousand values.
_KEYS = (
    PRELUDE
    + """
local function keys_in(packed)
  local keys = {}
  for i = 1, #packed / 16 do keys[i] = string.sub(packed, 16 * i - 15, 16 * i) end
  return keys
end

local function named(letter, keys)
  local names, begin = {}, prefix .. letter
  for i = 1, #keys do names[i] = begin .. keys[i] end
  return names
end

-- The string of each name, or false.
local function read(names)
  if #names == 0 then return {} end
  return redis.call('MGET', unpack(names))
end

local function call_with_all(list, command, name)
  for i = 1, #list, 4096 do
    local last = math.min(i + 4095, #list)
    if name then
      redis.call(command, name, unpack(list, i, last))
    else
      redis.call(command, unpack(list, i, last))
    end
  end
end

-- The numbers of living pools among those that have an object.
local function living_of(pools)
  local numbers = {}
  for pool in string.gmatch(pools, '%d+') do
    if living().names[pool] then numbers[#numbers + 1] = pool end
  end
  return numbers
end

local function without(pool, pools)
  return (string.gsub(pools, '%f[%d]' .. pool .. ' ', ''))  -- where a number begins
end

-- Say what pools have objects: what a function makes of those that were said to.
local function change(objects, said, make)
  local made, changed, gone = {}, {}, {}
  for i = 1, #objects do
    local old = said[i] or ''
    local new = made[old]
    if not new then
      new = make(old)
      made[old] = new
    end
    if new ~= old then
      if new == '' then
        gone[#gone + 1] = objects[i]
      else
        changed[#changed + 1] = objects[i]
        changed[#changed + 1] = new
      end
    end
  end
  call_with_all(changed, 'MSET')
  call_with_all(gone, 'DEL')
end
"""
)

CLAIM = Script(
    _KEYS
    + """
local seat, ttl, keys = seat_of(ARGV[1]), ARGV[2], keys_in(ARGV[3])
if not seat then return false end
local number = parts(seat)
local said, claims = read(named('o', keys)), named('c', keys)
local claimants = read(claims)
local held, answers = {[false] = false}, {}
for i = 1, #keys do
  local pools, claimant = said[i], claimants[i]
  if held[pools] == nil then held[pools] = #living_of(pools) > 0 end
  if held[pools] then
    answers[i] = '1'
  elseif claimant and claimant ~= number and living().members[claimant] then
    answers[i] = '2'
  else
    redis.call('SET', claims[i], number, 'PX', ttl)
    answers[i] = '0'
  end
end
return table.concat(answers)
"""
)

PUBLISH = Script(
    _KEYS
    + """
local pool, keys = living().numbers[ARGV[1]], keys_in(ARGV[2])
if not pool then return 0 end
local objects = named('o', keys)
change(objects, read(objects), function(pools)
  return without(pool, pools) == pools and pools .. pool .. ' ' or pools
end)
call_with_all(keys, 'SADD', prefix .. 'p' .. pool)
call_with_all(named('c', keys), 'DEL')
return 1
"""
)

WITHDRAW = Script(
    _KEYS
    + """
local pool, keys = living().numbers[ARGV[1]], keys_in(ARGV[2])
if not pool then return 0 end
local objects = named('o', keys)
change(objects, read(objects), function(pools) return without(pool, pools) end)
call_with_all(keys, 'SREM', prefix .. 'p' .. pool)
return 1
"""
)

ABANDON = Script(
    _KEYS
    + """
local seat, claims = seat_of(ARGV[1]), named('c', keys_in(ARGV[2]))
if not seat then return 0 end
local number, ended = parts(seat), {}
for i, claimant in ipairs(read(claims)) do
  if claimant == number then ended[#ended + 1] = claims[i] end
end
call_with_all(ended, 'DEL')
return 1
"""
)

# Which living pools have some objects, as two strings, for a client reads dozens for longer: the
# lists of names that there are, in JSON; and for each object, in 4 bytes, which of them it is: from
# 1, or 0 for none.
_FIND = (
    _KEYS
    + """
local none = struct.pack('<I4', 0)
local lists, which, found = {}, {[false] = none}, {}

local function list_of(pools)
  local names = living_of(pools)
  if #names == 0 then return none end
  for i = 1, #names do names[i] = living().names[names[i]] end
  lists[#lists + 1] = names
  return struct.pack('<I4', #lists)
end

-- Go on with these, of a prefix up to one that no pool has: whether it goes on behind them.
local function find(said, is_prefix)
  for i = 1, #said do
    local list = which[said[i]]
    if not list then
      list = list_of(said[i])
      which[said[i]] = list
    end
    if is_prefix and list == none then return false end
    found[#found + 1] = list
  end
  return true
end

local function answer() return {cjson.encode(lists), table.concat(found)} end
"""
)

HOLDERS = Script(
    _FIND
    + """
find(read(named('o', keys_in(ARGV[1]))))
return answer()
"""
)

# It reads few at first, and then four times as many: a prefix may end soon.
MATCH_PREFIX = Script(
    _FIND
    + """
local keys, from, size = ARGV[1], 1, 16 * 16
while from <= #keys do
  local part = keys_in(string.sub(keys, from, from + size - 1))
  if not find(read(named('o', part)), true) then break end
  from, size = from + size, 4 * size
end
return answer()
"""
)

WITHDRAW_ALL = Script(
    _FIND
    + """
local keys, holders = keys_in(ARGV[1]), {}
local objects = named('o', keys)
local said = read(objects)
find(said)
change(objects, said, function(pools)
  for _, pool in ipairs(living_of(pools)) do
    pools, holders[pool] = without(pool, pools), true
  end
  return pools
end)
for pool in pairs(holders) do call_with_all(keys, 'SREM', prefix .. 'p' .. pool) end
return answer()
"""
)

KEYS_OF = Script(
    PRELUDE
    + """
local pool, cursor, count = living().numbers[ARGV[1]], ARGV[2], ARGV[3]
if not pool then return {'0', ''} end
local page = redis.call('SSCAN', prefix .. 'p' .. pool, cursor, 'COUNT', count)
return {page[1], table.concat(page[2])}
"""
)

NUM_OBJECTS = Script(
    PRELUDE
    + """
local pool = living().numbers[ARGV[1]]
return pool and redis.call('SCARD', prefix .. 'p' .. pool) or 0
"""
)

# Forgets some objects; of pools that are done the names, behind whether there is more to do.
SWEEP = Script(
    _KEYS
    + """
local left = tonumber(ARGV[1])
redis.call('ZREMRANGEBYSCORE', prefix .. 'alive', '-inf', now)
local members = redis.call('HGETALL', prefix .. 'members')
for i = 1, #members, 2 do
  local seat = unpack(cmsgpack.unpack(members[i + 1]))
  if not is_alive(seat) then redis.call('HDEL', prefix .. 'members', members[i]) end
end
local pools = redis.call('HGETALL', prefix .. 'pools')
local answer = {0}
for i = 1, #pools, 2 do
  local pool = pools[i]
  if not living().names[pool] then
    local keys = redis.call('SPOP', prefix .. 'p' .. pool, left)
    local objects = named('o', keys)
    change(objects, read(objects), function(pools) return without(pool, pools) end)
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
