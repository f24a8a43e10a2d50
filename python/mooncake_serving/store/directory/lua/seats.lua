-- Members join and leave.
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
