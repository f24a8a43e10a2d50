-- Operations on keys, at most 4096 of them: Lua's stack has room for some thousand values.
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
