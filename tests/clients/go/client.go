// What the conformance kit talks to: one JSON request a line in, one JSON answer a line out.
package main

import (
	"bufio"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/lib/pq"
)

type request struct {
	Call string             `json:"call"`
	Args map[string]*string `json:"args"` // texts, or nil for null
	Run  string             `json:"run"`
	Wait float64            `json:"wait"`
}

var (
	ctx      = context.Background()
	notified bool
)

func answer(conn *sql.Conn, q request) (map[string]any, error) {
	switch {
	case q.Wait > 0:
		// Notifications come along with the answers of the server, so ask it something.
		until := time.Now().Add(time.Duration(q.Wait * float64(time.Second)))
		for !notified && time.Now().Before(until) {
			if err := conn.PingContext(ctx); err != nil {
				return nil, err
			}
			time.Sleep(100 * time.Millisecond)
		}
		return map[string]any{"notified": notified}, nil
	case q.Run != "":
		_, err := conn.ExecContext(ctx, q.Run)
		return map[string]any{"rows": []any{}}, err
	}
	// The names are the kit's own; the values are sent apart, as texts whose type is left open.
	var named []string
	var values []any
	for name, value := range q.Args {
		values = append(values, value)
		named = append(named, fmt.Sprintf("%s => $%d", name, len(values)))
	}
	rows, err := conn.QueryContext(ctx,
		fmt.Sprintf("select * from taskboard.%s(%s)", q.Call, strings.Join(named, ", ")), values...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	found, err := scanned(rows)
	return map[string]any{"rows": found}, err
}

// scanned reads all rows, each by the names of its columns; documents stay texts.
func scanned(rows *sql.Rows) ([]any, error) {
	found := []any{}
	columns, err := rows.Columns()
	for err == nil && rows.Next() {
		values, places := make([]any, len(columns)), make([]any, len(columns))
		for i := range values {
			places[i] = &values[i]
		}
		err = rows.Scan(places...)
		row := map[string]any{}
		for i, name := range columns {
			if bytes, ok := values[i].([]byte); ok {
				values[i] = string(bytes)
			}
			row[name] = values[i]
		}
		found = append(found, row)
	}
	if err == nil {
		err = rows.Err()
	}
	return found, err
}

func main() {
	connector, err := pq.NewConnector(os.Getenv("TASKBOARD_DATABASE_URL"))
	if err != nil {
		panic(err)
	}
	db := sql.OpenDB(pq.ConnectorWithNotificationHandler(connector,
		func(n *pq.Notification) { notified = true }))
	conn, err := db.Conn(ctx) // one session, not a pool's: transactions and LISTEN belong to it
	if err != nil {
		panic(err)
	}
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 8<<20)
	for lines.Scan() {
		var q request
		if err := json.Unmarshal(lines.Bytes(), &q); err != nil {
			panic(err)
		}
		found, err := answer(conn, q)
		var refused *pq.Error
		if errors.As(err, &refused) {
			found = map[string]any{"error": map[string]any{"sqlstate": refused.Code}}
		} else if err != nil {
			panic(err)
		}
		line, _ := json.Marshal(found)
		fmt.Println(string(line))
	}
}
