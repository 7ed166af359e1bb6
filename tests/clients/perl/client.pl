#!/usr/bin/perl
# What the conformance kit talks to: one JSON request a line in, one JSON answer a line out.
use v5.28;
use warnings;
use DBI;
use IO::Select;
use JSON::PP;
use Time::HiRes qw(time);

$| = 1;
my $json = JSON::PP->new->utf8->canonical;
# libpq's variables name the database: PGHOST, PGDATABASE, PGUSER …
my $db = DBI->connect('dbi:Pg:', undef, undef, {
    RaiseError => 1, PrintError => 0, AutoCommit => 1,
    pg_server_prepare => 0,    # a transaction pooler gives each call another session
    pg_enable_utf8 => 1,
});

sub answer {
    my ($request) = @_;
    if (exists $request->{wait}) {
        my $until = time + $request->{wait};
        my $socket = IO::Select->new($db->{pg_socket});
        until ($db->pg_notifies) {
            return { notified => JSON::PP::false } if time > $until;
            $socket->can_read(0.1);
        }
        return { notified => JSON::PP::true };
    }
    if (exists $request->{run}) {
        $db->do($request->{run});
        return { rows => [] };
    }
    # The names are the kit's own; the values are sent apart, as texts whose type is left open.
    # Documents come back as texts, to the last digit.
    my @names = sort keys %{ $request->{args} };
    my $named = join ', ', map { "$_ => ?" } @names;
    my $sql = "select * from taskboard.$request->{call}($named)";
    my @values = @{ $request->{args} }{@names};
    return { rows => $db->selectall_arrayref($sql, { Slice => {} }, @values) };
}

while (my $line = <STDIN>) {
    my $found = eval { answer($json->decode($line)) };
    $found //= { error => { sqlstate => $db->state, message => "$@" } };
    say $json->encode($found);
}
