#!/usr/bin/perl
# A complete Taskboard worker with DBD::Pg. Copy it, and put your own work into `work`.
#
#   PGHOST=… PGDATABASE=… PGUSER=… TASKBOARD_QUEUE=default perl worker.pl
use v5.28;
use warnings;
use DBI;
use Encode qw(encode_utf8);
use File::Temp qw(tempfile);
use JSON::PP;
use POSIX qw(WNOHANG);
use Time::HiRes qw(sleep time);

$| = 1;
my $queue = $ENV{TASKBOARD_QUEUE} // 'default';
my @kinds = ('kit');    # what `work` knows to do; other kinds are left to others
my $again = qr/^(08|57|40001|40P01|55P03|$)/;    # nothing changed, or nobody knows
my $stopping = 0;

# Your work: a document in, its result, a document, out. It runs in a process of its own, so that
# this one can renew the lease meanwhile; SIGTERM stops it.
sub work {
    my ($payload) = @_;
    my $todo = JSON::PP->new->utf8->decode($payload);
    sleep($todo->{seconds} // 0);
    die $todo->{fail} . "\n" if defined $todo->{fail};
    return $payload;
}

# The first row, or nothing: zero rows. A call without an answer is sent again: that is safe, since
# a claim whose answer was lost lapses, and everything else carries its token.
sub call {
    my ($patience, $sql, @values) = @_;
    state $db;
    my $give_up = time + $patience;
    while (1) {
        my $row = eval {
            $db //= DBI->connect('dbi:Pg:connect_timeout=10;tcp_user_timeout=10000', undef, undef, {
                RaiseError => 1, PrintError => 0, AutoCommit => 1, pg_server_prepare => 0,
                pg_enable_utf8 => 0,        # bytes in, bytes out
                AutoInactiveDestroy => 1,   # the work, a fork, leaves our connection alone
            });
            $db->selectrow_hashref($sql, undef, @values) // {};
        };
        return %$row ? $row : undef if $row;
        my ($error, $code) = ($@, $db ? $db->state : '');
        die $error if $code !~ $again || time > $give_up;
        undef $db;
        sleep 0.2;
    }
}

# Renew every third of the lease until the work has ended, and stop that when the lease is lost or
# the job cancelled. Answers why it was stopped, or '', and its exit status.
sub keep {
    my ($job, $pid) = @_;
    my $third = $job->{lease_seconds} / 3;
    my ($why, $next) = ('', time + $third);
    while (waitpid($pid, WNOHANG) == 0) {
        sleep 0.05;
        if ($stopping) {
            $why ||= 'stopping';
        }
        elsif (!$why && time >= $next) {
            $next = time + $third;
            my $renewed = eval {    # no answer: we may not hear of it before the lease runs out
                call($third, 'select cancel_requested from taskboard.renew(?, ?)',
                    $job->{job_id}, $job->{lease_token});
            };
            # Zero rows: somebody else may be at it by now.
            $why = !$renewed ? 'lost' : $renewed->{cancel_requested} ? 'cancelled' : '';
        }
        kill TERM => $pid if $why;
    }
    $why ||= 'stopping' if $stopping && $? & 127;    # the signal was for both of us
    return $why, $?;
}

# Do one job; answer what became of it. Zero rows from any call: it was no longer ours.
sub attempt {
    my ($job) = @_;
    my ($out) = tempfile(UNLINK => 1);
    defined(my $pid = fork) or die "fork: $!";
    if (!$pid) {
        $SIG{TERM} = 'DEFAULT';
        my $result = eval { work($job->{payload}) };
        print {$out} $result // encode_utf8($@);
        close $out;
        POSIX::_exit(defined $result ? 0 : 1);
    }
    my ($why, $code) = keep($job, $pid);
    seek $out, 0, 0;
    my $written = do { local $/; <$out> };
    my @ours = ($job->{job_id}, $job->{lease_token});
    my $row;
    if ($why eq 'lost') {
        return 'lost';    # record nothing: that is for the new owner to do
    }
    elsif ($why) {        # given back; after a cancel that ends the job
        $row = call(60, "select case state when 'cancelled' then state else 'released' end as word
            from taskboard.release(?, ?)", @ours);
    }
    elsif ($code) {
        $row = call(60, "select 'failed' as word from taskboard.fail(?, ?, ?)", @ours, $written);
    }
    else {
        $row = call(60, "select 'completed' as word from taskboard.complete(?, ?, ?)",
            @ours, $written);
    }
    return $row ? $row->{word} : 'lost';
}

$SIG{TERM} = sub { $stopping = 1 };
until ($stopping) {
    my $job = call(60, 'select job_id, lease_token, payload,
        extract(epoch from lease) as lease_seconds
        from taskboard.claim(queues => ?, kinds => ?)', [$queue], \@kinds);
    if ($job) {
        say attempt($job), " $job->{job_id}";
    }
    else {
        sleep 1;    # a signal ends it early
    }
}
