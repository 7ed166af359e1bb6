<?php
// What the conformance kit talks to: one JSON request a line in, one JSON answer a line out.

// libpq's variables name the database: PGHOST, PGDATABASE, PGUSER …
$db = new PDO('pgsql:', options: [
    PDO::ATTR_DEFAULT_FETCH_MODE => PDO::FETCH_ASSOC,
    // A transaction pooler gives each call another session, so nothing is prepared.
    PDO::PGSQL_ATTR_DISABLE_PREPARES => true,
]);

function answer(PDO $db, array $request): array
{
    if (isset($request['wait'])) {
        $found = $db->pgsqlGetNotify(PDO::FETCH_ASSOC, (int) ($request['wait'] * 1000));
        return ['notified' => $found !== false];
    }
    if (isset($request['run'])) {
        $db->exec($request['run']);
        return ['rows' => []];
    }
    // The names are the kit's own; the values are sent apart, as texts whose type is left open.
    // Documents come back as texts, to the last digit.
    $named = implode(', ', array_map(fn ($name) => "$name => ?", array_keys($request['args'])));
    $call = $db->prepare("select * from taskboard.{$request['call']}($named)");
    $call->execute(array_values($request['args']));
    return ['rows' => $call->fetchAll()];
}

while (($line = fgets(STDIN)) !== false) {
    try {
        $found = answer($db, json_decode($line, true, flags: JSON_THROW_ON_ERROR));
    } catch (PDOException $e) {
        $found = ['error' => ['sqlstate' => $e->errorInfo[0], 'message' => $e->getMessage()]];
    }
    echo json_encode($found, JSON_UNESCAPED_UNICODE | JSON_THROW_ON_ERROR), "\n";
}
