// A complete Taskboard worker with lib/pq. Copy it, and put your own work into work().
//
//	TASKBOARD_DATABASE_URL=postgresql://… TASKBOARD_QUEUE=default go run worker.go
package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"os/signal"
	"regexp"
	"syscall"
	"time"

	"github.com/lib/pq"
)

var (
	// What work() knows to do; other kinds are left to others.
	kinds = []string{"kit"}
	again = regexp.MustCompile("^(08|57|40001|40P01|55P03)") // nothing changed, or nobody knows
	db    *sql.DB                                            // a pool: renewals have their own session
)

type job struct {
	id, token, payload string
	lease              time.Duration
}

// work is yours. ctx tells it to stop; what it returns, a JSON document, is kept as the result.
func work(ctx context.Context, payload string) (string, error) {
	var todo struct {
		Seconds float64
		Fail    string
	}
	if err := json.Unmarshal([]byte(payload), &todo); err != nil {
		return "", err
	}
	select {
	case <-time.After(time.Duration(todo.Seconds * float64(time.Second))):
	case <-ctx.Done():
		return "", ctx.Err()
	}
	if todo.Fail != "" {
		return "", errors.New(todo.Fail)
	}
	return payload, nil
}

// call asks for one row and reads it into places; found is false for zero rows. A call without an
// answer is sent again: that is safe, since a claim whose answer was lost lapses, and everything
// else carries its token.
func call(patience time.Duration, places []any, text string, values ...any) (bool, error) {
	for giveUp := time.Now().Add(patience); ; time.Sleep(200 * time.Millisecond) {
		// A dead peer does not say so, and functions wait 5 s for a row at most.
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		err := db.QueryRowContext(ctx, text, values...).Scan(places...)
		cancel()
		if err == nil || errors.Is(err, sql.ErrNoRows) {
			return err == nil, nil
		}
		var refused *pq.Error // by the server; else the connection broke
		forGood := errors.As(err, &refused) && !again.MatchString(string(refused.Code))
		if forGood || time.Now().After(giveUp) {
			return false, err
		}
	}
}

// keep renews every third of the lease, whatever the work is doing, until that is done. It stops
// the work when the lease is lost or the job was cancelled; answers whether it is still ours.
func keep(done context.Context, j job, stop func()) bool {
	for {
		select {
		case <-done.Done():
			return true
		case <-time.After(j.lease / 3):
		}
		var cancelled bool
		ours, err := call(j.lease/3, []any{&cancelled},
			"select cancel_requested from taskboard.renew($1, $2)", j.id, j.token)
		ours = ours && err == nil // zero rows: lost; no answer in time: we could not know
		if !ours || cancelled {
			stop()
			return ours
		}
	}
}

// attempt does one job and tells what became of it. Zero rows from any call: it was not ours.
func attempt(stopping context.Context, j job) string {
	ctx, stop := context.WithCancel(stopping)
	done, end := context.WithCancel(context.Background())
	kept := make(chan bool)
	go func() { kept <- keep(done, j, stop) }()
	result, err := work(ctx, j.payload)
	stopped := ctx.Err() != nil
	end()
	ours, word := <-kept, ""
	switch {
	case !ours:
		return "lost" // record nothing: that is for the new owner to do
	case stopped: // given back; after a cancel that ends the job
		ours, err = call(time.Minute, []any{&word}, `select case state when 'cancelled' then state
			else 'released' end from taskboard.release($1, $2)`, j.id, j.token)
	case err != nil:
		ours, err = call(time.Minute, []any{&word},
			"select 'failed' from taskboard.fail($1, $2, $3)", j.id, j.token, err.Error())
	default:
		ours, err = call(time.Minute, []any{&word},
			"select 'completed' from taskboard.complete($1, $2, $3)", j.id, j.token, result)
	}
	if err != nil {
		log.Fatal(err)
	} else if !ours {
		return "lost"
	}
	return word
}

func main() {
	stopping, _ := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	queue := os.Getenv("TASKBOARD_QUEUE")
	db, _ = sql.Open("postgres", os.Getenv("TASKBOARD_DATABASE_URL"))
	for stopping.Err() == nil {
		var j job
		var seconds float64
		found, err := call(time.Minute, []any{&j.id, &j.token, &j.payload, &seconds},
			`select job_id, lease_token, payload, extract(epoch from lease)::float8
			from taskboard.claim(queues => $1, kinds => $2)`, pq.Array([]string{queue}), pq.Array(kinds))
		if err != nil {
			log.Fatal(err)
		}
		if found {
			j.lease = time.Duration(seconds * float64(time.Second))
			fmt.Println(attempt(stopping, j), j.id)
			continue
		}
		select {
		case <-time.After(time.Second):
		case <-stopping.Done():
		}
	}
}
