/* The lease protocol of one job, for Spin: workers that stall and crash anywhere, answers that get
 * lost, a lease that may expire at any time, and one failover that may lose what was committed.
 *
 * A transaction is two steps, "lock the row" and "decide, write and commit"; anything may happen in
 * between. Time is what is left of the lease: any number of ticks may pass at any point. What a
 * worker remembers of the clock ages with each tick. Variables marked "ghost" belong to no
 * program: they say what is true, and the assertions compare.
 *
 * A macro named on the command line breaks one rule; tests/faults/test_model.py says what must fail.
 */
#ifndef WORKERS
#define WORKERS 2
#endif
#define CLAIMS 3   /* so many claims are made at most, on all timelines together */
#ifndef LEASE
#define LEASE 1    /* ticks */
#endif
#define bit(n) (1 << (n))
#define me (_pid + 1)

/* A situation that must be possible: the test fails when no path comes here. */
#define reached assert(true)

typedef Row {      /* what is committed: the job, its end in the history, its effect's records */
  bool done;
  byte token;      /* 0: not leased */
  byte attempt;
  short left;      /* ticks until the deadline; not positive: lapsed */
  byte ended_by;   /* the token that completed it */
  byte begun;      /* tokens that began the effect, a bit each */
  byte happened;   /* tokens that said it took place */
  byte holder;     /* ghost: the claim that holds the job on this timeline */
  byte finisher;   /* ghost: the claim that was the holder when the job ended */
};

Row db;            /* the primary */
Row standby;       /* what would be left of it */
byte lock;         /* the session that has the row locked; 0: nobody */
byte tokens;       /* the last token: random in truth, hence never issued twice, not rolled back */
byte age[WORKERS + 1]; /* ticks since a worker looked at the clock */
bool failed_over;
bool acknowledged; /* ghost: somebody was told that the job is completed */
byte charged;      /* the world outside: keys that it has seen, a bit each */

#ifdef ATTEMPT_IS_FENCE
#define owns (db.token != 0 && attempt == db.attempt)
#else
#define owns (db.token != 0 && token == db.token)
#endif

/* A deadline is later than the clock that a worker read. */
#define unexpired_then(n) (db.left + age[n] > 0)

/* By a reading of the clock so many ticks ago. */
#ifdef RECLAIM_EARLY
#define claimable(ago) (!db.done && (db.token == 0 || db.left <= 1))
#else
#ifdef STATUS_INSTEAD_OF_LEASE
#define claimable(ago) (!db.done && db.token == 0)
#else
#define claimable(ago) (!db.done && (db.token == 0 || db.left + ago <= 0))
#endif
#endif

#ifdef TOKEN_IGNORED
#define completes (!db.done)
#else
#ifdef COMPLETION_ASKS_FOR_DEADLINE
#define completes (!db.done && matched && db.left > 0)
#else
#define completes (!db.done && matched)
#endif
#endif

inline commit() {
#ifdef SYNCHRONOUS
  copy();
#endif
  unlock()
}

inline copy() {
  standby.done = db.done; standby.token = db.token; standby.attempt = db.attempt;
  standby.left = db.left; standby.ended_by = db.ended_by; standby.begun = db.begun;
  standby.happened = db.happened; standby.holder = db.holder; standby.finisher = db.finisher
}

inline forget() { token = 0; attempt = 0; wanted = 0; matched = false; lapsed = false; age[me] = LEASE }

/* What no step looks at any more has one value, so that it makes no two states of one. */
inline unlocked() { age[me] = LEASE; matched = false; lapsed = false }

inline unlock() { lock = 0; unlocked() }

/* Wait for the row, as `for update` does; the clock is read before (wrong) or after. */
inline lock_row() {
  age[me] = 0;
  matched = owns;
  atomic {
    lock == 0 -> lock = me;
    lapsed = db.left <= 0;
#ifndef CLOCK_BEFORE_LOCK
    age[me] = 0;
#endif
#ifndef LOOK_THEN_COMPLETE
    matched = owns
#endif
  }
}

active [WORKERS] proctype Worker() {
  byte token, attempt;
  byte wanted;     /* the key that the effect will carry; 0: none */
  bool matched;    /* the row had its token, when it looked */
  bool lapsed;     /* ghost: the lease had lapsed when it had the row */

idle:
  forget();
end_idle:
  atomic { tokens < CLAIMS && claimable(0) -> age[me] = 0 }
  /* claim: skip locked, look again, then the clock once more for the deadline. */
  atomic {
    if
#ifdef CLAIM_IN_TWO_STEPS
    :: true -> skip
#else
    :: lock == 0 && claimable(age[me]) && tokens < CLAIMS -> lock = me; age[me] = 0
#endif
    :: else -> goto idle
    fi
  }
  atomic {
    if
#ifdef CLAIM_IN_TWO_STEPS
    :: tokens < CLAIMS ->
#else
    :: lock == me ->
#endif
      assert(!db.done);                              /* S5: nothing after the end */
      assert(db.token == 0 || db.left <= 0);         /* S3: no early reclaim */
      if :: db.token != 0 -> reached :: else fi;  /* a lapsed lease is taken over */
      tokens++;
      db.token = tokens; db.holder = tokens; db.attempt++; db.left = LEASE - age[me];
      token = tokens; attempt = db.attempt;
      commit()
    :: lock == me -> unlock(); goto idle           /* crashed before it committed */
    :: lock != me -> goto idle                     /* the failover ended the session */
    fi
  }
  if
  :: true -> skip
  :: true -> goto idle                               /* the answer was lost, or a crash */
  fi;

working:
  if
  :: goto renewing
  :: goto releasing
  :: wanted == 0 -> goto effect
  :: goto completing
  :: goto idle                                       /* a crash */
  fi;

renewing:
  lock_row();
  atomic {
    if
#ifdef RENEW_REVIVES
    :: lock == me && owns ->
#else
    :: lock == me && owns && unexpired_then(me) ->
#endif
      assert(db.holder == token);                    /* S2: the fence */
      assert(!lapsed);                               /* S2: a lapsed lease is not revived */
      reached;
      db.left = LEASE - age[me];
      commit();
      goto working
    :: lock == me && !(owns && unexpired_then(me)) -> unlock(); goto idle
    :: lock != me -> unlocked(); goto working      /* unknown: a worker may go on meanwhile */
    fi
  }

releasing: /* stands for fail, too */
  lock_row();
  atomic {
    if
    :: lock == me && owns ->
      assert(db.holder == token);                    /* S2 */
      db.token = 0; db.holder = 0; db.left = -LEASE;
      commit()
    :: lock == me && !owns -> unlock()
    :: lock != me -> skip
    fi;
    goto idle
  }

effect: /* begin_effect locks, reads the clock, decides: nobody renews or reclaims meanwhile */
  atomic {
    lock == 0;
    if
#ifdef GATE_WITHOUT_DEADLINE
    :: owns ->
#else
    :: owns && db.left > 0 ->
#endif
      assert(db.holder == token && db.left > 0);     /* S2: a gate like renewal */
#ifdef LEDGER_PER_ATTEMPT
      if
      :: db.happened & bit(token) -> goto completing
      :: else -> assert(!db.happened)                /* E1: after done, nobody is told fresh */
      fi;
#else
      if :: db.happened -> reached; goto completing :: else fi;
#endif
      db.begun = db.begun | bit(token);
#ifdef KEY_PER_ATTEMPT
      wanted = token;
#else
      wanted = CLAIMS + 1;                           /* made of the job's id alone */
#endif
      commit()
    :: else -> goto idle
    fi
  }
  /* The call outside, however late: no fence reaches it, only the key does. */
  atomic {
    if :: db.token != token -> reached :: else fi;   /* it is no longer the owner */
    charged = charged | bit(wanted);
    assert((charged & (charged - 1)) == 0)           /* E1: one key, so one charge */
  }
  atomic { /* end_effect asks who began it, not who owns the job */
    lock == 0;
    if
    :: db.begun & bit(token) -> db.happened = db.happened | bit(token); commit()
    :: else -> reached                            /* the failover lost the record */
    fi
  }
  goto working;

completing:
  lock_row();
  atomic {
    if
    :: lock == me && completes ->
      assert(db.holder == token);                    /* S2 */
      if :: db.left <= 0 -> reached :: else fi;   /* late, and nobody has overtaken it */
      db.done = true; db.ended_by = token; db.finisher = db.holder;
      db.token = 0; db.holder = 0; db.left = -LEASE;
      commit();
      if
      :: acknowledged = true
      :: goto completing                             /* no answer: say it again */
      :: true                                        /* a crash */
      fi
    :: lock == me && !completes && !db.done ->       /* zero rows: somebody else owns it */
      unlock(); reached
    :: lock == me && db.done ->
      unlock();
#ifndef COMPLETION_NOT_REPEATABLE
      if
      :: db.ended_by == token ->
        assert(db.finisher == token); reached; acknowledged = true
      :: else
      fi;
#else
      assert(db.ended_by != token)                   /* S7: what happened is not denied */
#endif
    :: lock != me -> unlocked(); goto completing   /* the session ended: unknown */
    fi;
    goto idle
  }
}

inline forget_standby() {
  standby.done = false; standby.token = 0; standby.attempt = 0; standby.left = 0;
  standby.ended_by = 0; standby.begun = 0; standby.happened = 0; standby.holder = 0;
  standby.finisher = 0
}

/* One failover: the standby has any earlier state, or the last one if commits wait for it. */
active proctype Failover() {
  do
  :: atomic { !failed_over -> copy() }
#ifndef NO_FAILOVER
  :: atomic {
      !failed_over ->
      if :: db.done && !standby.done -> reached :: else fi;
      if :: db.token != standby.token -> reached :: else fi;
      db.done = standby.done; db.token = standby.token; db.attempt = standby.attempt;
      db.left = standby.left; db.ended_by = standby.ended_by; db.begun = standby.begun;
      db.happened = standby.happened; db.holder = standby.holder;
      db.finisher = standby.finisher;
      lock = 0; failed_over = true;
      forget_standby();
#ifdef COMPLETION_STAYS
      assert(!acknowledged || db.done)               /* S6 */
#endif
    }
#endif
  :: failed_over -> break
  od
}

inline tick(row) { if :: row.left > -LEASE -> row.left-- :: else fi }

active proctype Clock() {
  byte n;
end:
  do
  :: atomic {
      db.token != 0 && db.left > -LEASE || standby.token != 0 && standby.left > -LEASE ->
      tick(db); tick(standby);
      n = 0;
      do
      :: n <= WORKERS - 1 -> if :: age[n] < LEASE -> age[n]++ :: else fi; n++
      :: else -> n = 0; break
      od
    }
  od
}

/* When nothing can move any more. */
active proctype Quiet() {
  timeout -> assert(db.done || tokens == CLAIMS)     /* L1: it ended, or we counted no further */
}
