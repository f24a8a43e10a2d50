"""The operations of a directory in Redis: scripts, each of which is atomic.

Names begin with the cluster's in braces, which keeps them all on one node of a Redis Cluster. After
it follows:

    o<key>    string: numbers of the pools that have the object, each followed by a space
    c<key>    string, with a time to live: seat of the member that has a claim to it
    r<key>    string, with a time to live: numbers of the pools that had it when it was removed
    l<key>    string, with a time to live: numbers of the pools that are giving it up
    p<pool>   set: keys of the objects of the pool with this number
    alive     sorted set: seats, by when they expire, in milliseconds of the server's clock
    served    sorted set: numbers of pools, by when the last seat of each expires
    members   hash: from a member's name to its seat, the server that it joined, and its entry
    pools     hash: from a pool's number to its name
    names     hash: from a pool's name to its number
    numbers   string: the last number that was given

A seat is "<member> <pool> <name of the pool>", with numbers, and pool 0 for none. Members and pools
get new numbers whenever they come to life, so they do not inherit anything from their predecessors.
Entries of dead pools stay until they are swept.

Keys come as one string, 16 bytes each: reading thousands of arguments would take longer than the
work itself. The values of all keys are read by one command, and written by one. Most keys of a
prompt have the same value: it is decoded once.

A server that is out of memory refuses a script whose first write command may need memory: scripts
that free something begin with a different command.
"""

from .redis_script import Script

PRELUDE = """
local prefix = KEYS[1]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- Whether a seat, or a pool by its number, has not run out.
local function lives(list, who)
  local till = redis.call('ZSCORE', prefix .. list, who)
  return till and tonumber(till) > now
end

-- The seat of a living member, and the server that it joined.
local function seat_of(name)
  local record = redis.call('HGET', prefix .. 'members', name)
  if not record then return nil end
  local seat, joined = unpack(cmsgpack.unpack(record))
  if lives('alive', seat) then return seat, joined end
end

local function parts(seat) return string.match(seat, '^(%d+) (%d+) (.*)$') end

-- The number of a living pool.
local function number_of(name)
  local pool = redis.call('HGET', prefix .. 'names', name)
  if pool and lives('served', pool) then return pool end
end
"""

# Members join and leave.
_SEATS = (
    PRELUDE
    + """
-- A restart changes the one for sure, a failover the other.
local function server()
  local about, role = redis.call('INFO', 'server'), redis.call('INFO', 'replication')
  return string.match(about, 'run_id:(%w+)') .. string.match(role, 'master_replid:(%w+)')
end

-- A seat of a pool runs out then, or is gone: until when is the pool served?
local function serve(pool, till)
  if pool == '0' then return end
  if till < tonumber(redis.call('ZSCORE', prefix .. 'served', pool) or 0) then
    local seats = redis.call('ZREVRANGE', prefix .. 'alive', 0, -1, 'WITHSCORES')
    for i = 1, #seats, 2 do
      local _, other = parts(seats[i])
      if other == pool then
        till = seats[i + 1]
        break
      end
    end
  end
  redis.call('ZADD', prefix .. 'served', till, pool)
end

local function sit(name, seat, entry, ttl)
  local till, _, pool = now + ttl, parts(seat)
  redis.call('ZADD', prefix .. 'alive', till, seat)
  redis.call('HSET', prefix .. 'members', name, cmsgpack.pack({seat, server(), entry}))
  serve(pool, till)
end

local function stand_up(seat)
  local _, pool = parts(seat)
  redis.call('ZREM', prefix .. 'alive', seat)
  serve(pool, 0)
end
"""
)

JOIN = Script(
    _SEATS
    + """
local name, pool, entry, ttl = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local seat = seat_of(name)
if seat and select(3, parts(seat)) ~= pool then
  stand_up(seat)
  seat = nil
end
if not seat then
  local number = '0'
  if pool ~= '' then
    number = number_of(pool)
    if not number then
      number = tostring(redis.call('INCR', prefix .. 'numbers'))
      redis.call('HSET', prefix .. 'pools', number, pool)
      redis.call('HSET', prefix .. 'names', pool, number)
    end
  end
  seat = redis.call('INCR', prefix .. 'numbers') .. ' ' .. number .. ' ' .. pool
end
sit(name, seat, entry, ttl)
return 1
"""
)

RENEW = Script(
    _SEATS
    + """
local name, pool, entry, ttl = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local seat, joined = seat_of(name)
if not seat or joined ~= server() or select(3, parts(seat)) ~= pool then return 0 end
sit(name, seat, entry, ttl)
return 1
"""
)

LEAVE = Script(
    _SEATS
    + """
local seat = seat_of(ARGV[1])
if seat then stand_up(seat) end
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
  if lives('alive', seat) then entries[#entries + 1] = entry end
end
return entries
"""
)

# Operations on keys, at most 4096 of them: Lua's stack has room for some thousand values.
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

-- For a set its name goes before; pairs stay together.
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

-- The name of a living pool, by its number; false of another.
local known = {}
local function name_of(pool)
  local name = known[pool]
  if name == nil then
    name = lives('served', pool) and redis.call('HGET', prefix .. 'pools', pool)
    known[pool] = name
  end
  return name
end

-- The numbers of living pools among those that have an object.
local function living_of(pools)
  local living = {}
  for pool in string.gmatch(pools, '%d+') do
    if name_of(pool) then living[#living + 1] = pool end
  end
  return living
end

local function without(pool, pools)
  return (string.gsub(pools, '%f[%d]' .. pool .. ' ', ''))  -- where a number begins
end

local function with(pool, pools)
  return without(pool, pools) == pools and pools .. pool .. ' ' or pools
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
local said, claims = read(named('o', keys)), named('c', keys)
local claimants = read(claims)
local _, own = parts(seat)
local held, writes, answers = {[false] = false}, {[false] = false, [seat] = false}, {}
for i = 1, #keys do
  local pools, claimant = said[i], claimants[i]
  if held[pools] == nil then
    local living = living_of(pools)
    held[pools] = #living > 0 and ((#living > 1 or living[1] ~= own) and '\\1' or '\\3')
  end
  if writes[claimant] == nil then writes[claimant] = lives('alive', claimant) end
  if held[pools] then
    answers[i] = held[pools]
  elseif writes[claimant] then
    answers[i] = '\\2'
  else
    redis.call('SET', claims[i], seat, 'PX', ttl)
    answers[i] = '\\0'
  end
end
return table.concat(answers)
"""
)

# Publish objects of a pool, but no copies of removed objects.
_PUBLISH = """
local pool, keys = number_of(ARGV[1]), keys_in(ARGV[2])
if not pool then return string.rep('\\2', #keys) end
local removed, answers, listed = read(named('r', keys)), {}, {}
for i = 1, #keys do
  local is_refused = is_copy and removed[i]
  answers[i] = is_refused and '\\1' or '\\0'
  if not is_refused then listed[#listed + 1] = keys[i] end
end
local objects = named('o', listed)
change(objects, read(objects), function(pools) return with(pool, pools) end)
call_with_all(listed, 'SADD', prefix .. 'p' .. pool)
call_with_all(named('c', listed), 'DEL')
call_with_all(named('r', listed), 'DEL')
return table.concat(answers)
"""

PUBLISH = Script(_KEYS + "local is_copy = false" + _PUBLISH)

PUBLISH_COPIES = Script(_KEYS + "local is_copy = true" + _PUBLISH)

# Publish objects that are being put into a pool, if no other pool has them and nobody else writes
# them. One byte per key: 0 if it is published, 1 if not; 2 if the command is too late, and nothing
# is published: whoever has sent it has given up.
#
# A writer waits for this. So what is usual, that nobody has or claims any of them, comes first,
# before functions are made that take longer than all of it.
PUBLISH_NEW = Script(
    """
local prefix, packed = KEYS[1], ARGV[3]
local count = #packed / 16
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if now > tonumber(ARGV[2]) then return string.rep('\\2', count) end
local pool = redis.call('HGET', prefix .. 'names', ARGV[1])
local till = pool and redis.call('ZSCORE', prefix .. 'served', pool)
if not till or tonumber(till) <= now then return string.rep('\\1', count) end
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
  return string.rep('\\0', count)
end
"""
    + _KEYS
    + """
local held, writes = {[false] = false}, {[false] = false}
local answers, listed, changed, before, ended = {}, {}, {}, {}, {}
for i = 1, count do
  local pools, claimant, removed = said[i], said[count + i], said[2 * count + i]
  if held[pools] == nil then
    local living = living_of(pools)
    held[pools] = #living > 1 or #living == 1 and living[1] ~= pool
  end
  if writes[claimant] == nil then writes[claimant] = lives('alive', claimant) end
  if held[pools] or writes[claimant] then
    answers[i] = '\\1'
  else
    answers[i] = '\\0'
    listed[#listed + 1], changed[#changed + 1], before[#before + 1] = keys[i], names[i], pools
    if claimant then ended[#ended + 1] = names[count + i] end
    if removed then ended[#ended + 1] = names[2 * count + i] end
  end
end
change(changed, before, function(pools) return with(pool, pools) end)
call_with_all(listed, 'SADD', prefix .. 'p' .. pool)
call_with_all(ended, 'DEL')
return table.concat(answers)
"""
)

WITHDRAW = Script(
    _KEYS
    + """
local pool, keys = number_of(ARGV[1]), keys_in(ARGV[2])
if not pool then return 0 end
local objects, marks = named('o', keys), named('l', keys)
call_with_all(keys, 'SREM', prefix .. 'p' .. pool)
change(objects, read(objects), function(pools) return without(pool, pools) end)
for i, leaving in ipairs(read(marks)) do
  if leaving then redis.call('SET', marks[i], without(pool, leaving), 'KEEPTTL') end
end
return 1
"""
)

GIVE_UP = Script(
    _KEYS
    + """
local pool, keys, ttl = number_of(ARGV[1]), keys_in(ARGV[2]), ARGV[3]
local said, has_other, answers, going = read(named('o', keys)), {[false] = false}, {}, {}
for i = 1, #keys do
  local pools = said[i]
  if has_other[pools] == nil then
    local living = living_of(pools)
    has_other[pools] = #living > 0 and (#living > 1 or living[1] ~= pool)
  end
  answers[i] = has_other[pools] and '\\1' or '\\0'
  if has_other[pools] and pool and with(pool, pools) == pools then going[#going + 1] = keys[i] end
end
if #going > 0 then
  local objects, marks = named('o', going), named('l', going)
  call_with_all(going, 'SREM', prefix .. 'p' .. pool)
  change(objects, read(objects), function(pools) return without(pool, pools) end)
  for i, leaving in ipairs(read(marks)) do
    redis.call('SET', marks[i], with(pool, leaving or ''), 'PX', ttl)
  end
end
return table.concat(answers)
"""
)

ABANDON = Script(
    _KEYS
    + """
local seat, claims = seat_of(ARGV[1]), named('c', keys_in(ARGV[2]))
if not seat then return 0 end
local ended = {}
for i, claimant in ipairs(read(claims)) do
  if claimant == seat then ended[#ended + 1] = claims[i] end
end
call_with_all(ended, 'DEL')
return 1
"""
)

# Which living pools have some objects, as two strings, since clients are slow to read dozens: the
# distinct lists of names, in JSON; and 4 bytes per object, the index of its list: from 1, or 0 for
# none.
_FIND = (
    _KEYS
    + """
local none = struct.pack('<I4', 0)
local lists, which, found = {}, {[false] = none}, {}

local function list_of(pools)
  local names = living_of(pools)
  if #names == 0 then return none end
  for i = 1, #names do names[i] = name_of(names[i]) end
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

# Reads few keys at first, then four times as many each time: a prefix may end soon.
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

# Mark objects as no longer present in the pools that have them, and remember the removal for a
# time.
REMOVE = Script(
    _FIND
    + """
local keys, ttl = keys_in(ARGV[1]), ARGV[2]
local objects, marks = named('o', keys), named('r', keys)
local leaving = named('l', keys)
local said, before, going, had, listed = read(objects), read(marks), read(leaving), {}, {}
local living = {[false] = {}}  -- of what is said
for i = 1, #keys do
  local pools = said[i]
  living[pools] = living[pools] or living_of(pools)
  for _, pool in ipairs(living[pools]) do
    listed[pool] = listed[pool] or {}
    table.insert(listed[pool], keys[i])
  end
  had[i] = pools or ''
  if before[i] or going[i] then
    for _, pool in ipairs(living_of((before[i] or '') .. (going[i] or ''))) do
      had[i] = with(pool, had[i])
    end
  end
end
find(had)
for pool, some in pairs(listed) do call_with_all(some, 'SREM', prefix .. 'p' .. pool) end
change(objects, said, function(pools)
  for _, pool in ipairs(living_of(pools)) do pools = without(pool, pools) end
  return pools
end)
call_with_all(leaving, 'DEL')
call_with_all(marks, 'DEL')  -- gives something up, so that what follows is not refused
for i = 1, #keys do redis.call('SET', marks[i], had[i], 'PX', ttl) end
return answer()
"""
)

KEYS_OF = Script(
    PRELUDE
    + """
local pool, cursor, count = number_of(ARGV[1]), ARGV[2], ARGV[3]
if not pool then return {'0', ''} end
local page = redis.call('SSCAN', prefix .. 'p' .. pool, cursor, 'COUNT', count)
return {page[1], table.concat(page[2])}
"""
)

NUM_OBJECTS = Script(
    PRELUDE
    + """
local pool = number_of(ARGV[1])
return pool and redis.call('SCARD', prefix .. 'p' .. pool) or 0
"""
)

# Forget some objects; return whether there is more to do, and the names of pools that are done.
SWEEP = Script(
    _KEYS
    + """
local left = tonumber(ARGV[1])
redis.call('ZREMRANGEBYSCORE', prefix .. 'alive', '-inf', now)
local members = redis.call('HGETALL', prefix .. 'members')
for i = 1, #members, 2 do
  local seat = unpack(cmsgpack.unpack(members[i + 1]))
  if not lives('alive', seat) then redis.call('HDEL', prefix .. 'members', members[i]) end
end
local pools = redis.call('HGETALL', prefix .. 'pools')
local answer = {0}
for i = 1, #pools, 2 do
  local pool, name = pools[i], pools[i + 1]
  if not name_of(pool) then
    local keys = redis.call('SPOP', prefix .. 'p' .. pool, left)
    local objects = named('o', keys)
    change(objects, read(objects), function(pools) return without(pool, pools) end)
    if #keys == left then
      answer[1] = 1
      return answer
    end
    left = left - #keys
    redis.call('ZREM', prefix .. 'served', pool)
    redis.call('HDEL', prefix .. 'pools', pool)
    if redis.call('HGET', prefix .. 'names', name) == pool then
      redis.call('HDEL', prefix .. 'names', name)
    end
    answer[#answer + 1] = name
  end
end
return answer
"""
)
