-- What all scripts begin with.
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
