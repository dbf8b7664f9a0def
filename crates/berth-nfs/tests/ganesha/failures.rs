//! Servers that freeze, die, come back, refuse, or speak less than we do.

use std::{
    fs,
    time::{Duration, Instant},
};

use berth_nfs::{Change, Create, Error, Kind, Nfs, Share, Target, Version};
use bytes::Bytes;
use futures_util::future::join_all;
use tokio::time::timeout;

use super::server::{Server, chain};

/// So long a patient target waits for a server that is silent; what took less has waited for none.
const AT_ONCE: Duration = Duration::from_secs(20);

fn impatient(server: &Server, version: Version) -> Target {
    let mut target = server.target(version);
    target.options.timeout = Duration::from_secs(1);
    target
}

/// An impatient target's share, after as many attempts as a busy machine needs.
async fn impatient_share(nfs: &Nfs, server: &Server, version: Version) -> Share {
    let begun = Instant::now();
    loop {
        match nfs.share(&impatient(server, version)).await {
            Ok(share) => return share,
            Err(error) => {
                let waits = away(&error) && begun.elapsed() < Duration::from_secs(60);
                assert!(waits, "{version}: {}", chain(&error));
            }
        }
    }
}

/// What may happen to a call while its server is away.
fn away(error: &Error) -> bool {
    matches!(error.kind(), Kind::Unreachable | Kind::Interrupted)
}

#[tokio::test]
async fn a_frozen_server_fails_its_own_calls_in_time_and_nobody_elses() {
    let (mut frozen, healthy) = (Server::start(), Server::start());
    for version in Version::ALL {
        let nfs = Nfs::new();
        let share = impatient_share(&nfs, &frozen, version).await;
        let patient = nfs.share(&frozen.target(version)).await.unwrap();
        let other = nfs.share(&healthy.target(version)).await.unwrap();
        frozen.send("stop");
        let calls =
            |share: &Share| {
                join_all((0..100).map(|n| {
                    let share = share.clone();
                    async move {
                        share.make_dir(&share.root(), format!("{version} {n}"), &Change::default()).await
                    }
                }))
            };
        let others = async {
            for n in 0..20 {
                let name = format!("{version} {n}");
                other.make_dir(&other.root(), name, &Change::default()).await.unwrap();
            }
        };
        tokio::select! {
            biased;
            _ = calls(&patient) => panic!("{version}: the other server waited"),
            () = others => {}
        }
        let begun = Instant::now();
        for result in calls(&share).await {
            let error = result.unwrap_err();
            assert_eq!(error.kind(), Kind::Unreachable, "{}", chain(&error));
            assert!(chain(&error).contains("did not answer"), "{}", chain(&error));
        }
        assert!(begun.elapsed() < AT_ONCE, "{version}: {:?}", begun.elapsed());
        let error = nfs.share(&impatient(&frozen, version)).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Unreachable, "{}", chain(&error));
        frozen.send("cont");
        // Thawed, it first does what was asked long ago.
        let thawed = Nfs::new().share(&frozen.target(version)).await;
        thawed.unwrap_or_else(|error| panic!("{version}: {}", chain(&error)));
        impatient_share(&nfs, &frozen, version).await;
    }
}

#[tokio::test]
async fn a_share_survives_the_death_and_return_of_its_server() {
    let mut server = Server::start();
    for version in Version::ALL {
        let share = server.share(version).await;
        let dir = share.make_dirs(&format!("{version}/x"), &Change::default()).await.unwrap().0;
        server.send("kill");
        let begun = Instant::now();
        let error = share.attributes(&dir.handle).await.unwrap_err();
        assert!(away(&error), "{version}: {}", chain(&error));
        assert!(begun.elapsed() < AT_ONCE);
        server.send("start");
        let is = share.attributes(&dir.handle).await.unwrap_or_else(|e| panic!("{version}: {}", chain(&e)));
        assert_eq!(is.fileid, dir.attributes.fileid);
        let file = share.create(&dir.handle, "file", Create::New, &Change::default()).await;
        let file = file.unwrap_or_else(|e| panic!("{version}: {}", chain(&e))).handle;
        share.write(&file, 0, Bytes::from_static(b"alive"), true).await.unwrap();
        assert_eq!(fs::read_to_string(server.export().join(format!("{version}/x/file"))).unwrap(), "alive");
    }
}

#[tokio::test]
async fn a_server_that_comes_back_with_other_handles_is_found_again() {
    let mut server = Server::start();
    for version in Version::ALL {
        let (nfs, target) = (Nfs::new(), server.target(version));
        let old = nfs.share(&target).await.unwrap();
        server.send("kill");
        fs::remove_dir_all(server.export()).unwrap();
        fs::create_dir(server.export()).unwrap();
        server.send("start");
        let error = old.make_dirs("x", &Change::default()).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Stale, "{version}: {}", chain(&error));
        let new = nfs.share(&target).await.unwrap_or_else(|error| panic!("{version}: {}", chain(&error)));
        new.make_dirs("x", &Change::default()).await.unwrap();
        assert!(server.export().join("x").exists());
    }
}

#[tokio::test]
async fn what_the_server_forgot_before_it_was_on_disk_is_noticed() {
    let mut server = Server::start();
    for version in Version::ALL {
        let share = server.share(version).await;
        let name = format!("file {version}");
        let file = share.create(&share.root(), &name, Create::New, &Change::default()).await.unwrap().handle;
        share.write(&file, 0, Bytes::from_static(b"perhaps"), false).await.unwrap();
        server.send("kill");
        server.send("start");
        let lost = share.commit(&file).await.unwrap_err();
        assert_eq!(lost.kind(), Kind::Interrupted, "{version}: {}", chain(&lost));
        share.write(&file, 0, Bytes::from_static(b"surely!"), false).await.unwrap();
        share.commit(&file).await.unwrap();
    }
}

#[tokio::test]
async fn a_commit_that_failed_or_was_dropped_is_still_to_be_done() {
    let mut server = Server::start();
    for version in [Version::V3, Version::V4_1] {
        let share = server.share(version).await;
        let name = format!("file {version}");
        let file = share.create(&share.root(), &name, Create::New, &Change::default()).await.unwrap().handle;
        share.write(&file, 0, Bytes::from_static(b"perhaps"), false).await.unwrap();
        server.send("stop");
        // The clock jumps to whatever is waited for next, as the server will not answer.
        tokio::time::pause();
        assert!(timeout(Duration::from_millis(100), share.commit(&file)).await.is_err());
        assert_eq!(share.commit(&file).await.unwrap_err().kind(), Kind::Unreachable);
        tokio::time::resume();
        server.send("kill");
        server.send("start");
        let lost = share.commit(&file).await.unwrap_err();
        assert_eq!(lost.kind(), Kind::Interrupted, "{version}: {}", chain(&lost));
        share.commit(&file).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_goes_on_through_repeated_crashes_of_the_server() {
    let mut server = Server::start();
    let mut target = server.target(Version::V4_1);
    target.options.versions = Version::ALL.to_vec();
    let nfs = Nfs::new();
    let work = |n: u32| {
        let (nfs, target) = (&nfs, &target);
        async move {
            // What a caller does: repeat the whole until it succeeds.
            loop {
                let done = async {
                    let share = nfs.share(target).await?;
                    let (dir, _) = share.make_dirs(&format!("work/{n}"), &Change::mode(0o750)).await?;
                    let file =
                        share.create(&dir.handle, "data", Create::Truncate, &Change::mode(0o600)).await?;
                    share.write(&file.handle, 0, Bytes::from(n.to_string()), true).await?;
                    Ok::<_, Error>(())
                };
                match done.await {
                    Ok(()) => return,
                    Err(error) => assert!(away(&error) || error.kind() == Kind::Stale, "{}", chain(&error)),
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    };
    let all = join_all((0..200).map(work));
    let crashes = async {
        for _ in 0..3 {
            tokio::time::sleep(Duration::from_millis(100)).await;
            tokio::task::block_in_place(|| server.send("kill"));
            tokio::task::block_in_place(|| server.send("start"));
        }
    };
    timeout(Duration::from_secs(60), async { tokio::join!(all, crashes) }).await.expect("it converges");
    for n in 0..200 {
        let data = fs::read_to_string(server.export().join(format!("work/{n}/data"))).unwrap();
        assert_eq!(data, n.to_string());
    }
}

#[tokio::test]
async fn dropped_calls_leave_nothing_in_the_way_of_others() {
    let mut server = Server::start();
    for version in Version::ALL {
        let share = server.share(version).await;
        // More than a session has slots.
        server.send("stop");
        let calls = join_all((0..300).map(|n| {
            let share = &share;
            async move {
                share.make_dir(&share.root(), format!("dropped {version} {n}"), &Change::default()).await
            }
        }));
        assert!(timeout(Duration::from_millis(200), calls).await.is_err());
        server.send("cont");
        let calls =
            (0..300).map(|n| {
                let share = &share;
                async move {
                    share.make_dir(&share.root(), format!("kept {version} {n}"), &Change::default()).await
                }
            });
        for made in join_all(calls).await {
            made.unwrap_or_else(|error| panic!("{version}: {}", chain(&error)));
        }
    }
}

#[tokio::test]
async fn the_best_version_that_both_speak_is_found_and_remembered() {
    for (options, expected) in [
        (["minor=0,1,2", "protocols=3,4"], Version::V4_2),
        (["minor=0,1", "protocols=4"], Version::V4_1),
        (["minor=0", "protocols=4"], Version::V4_0),
        (["minor=0", "protocols=3"], Version::V3),
    ] {
        let server = Server::with(&options);
        let nfs = Nfs::new();
        let mut target = server.target(expected);
        target.options.versions = Version::ALL.to_vec();
        for _ in 0..2 {
            let share =
                nfs.share(&target).await.unwrap_or_else(|error| panic!("{expected}: {}", chain(&error)));
            assert_eq!(share.version(), expected);
        }
        if expected != Version::V4_2 {
            target.options.versions = vec![Version::V4_2];
            let error = nfs.share(&target).await.unwrap_err();
            assert_eq!(error.kind(), Kind::Unsupported, "{}", chain(&error));
        }
    }
}

#[tokio::test]
async fn servers_that_refuse_are_understood() {
    let read_only = Server::with(&["access=RO"]);
    let squashed = Server::with(&["squash=Root"]);
    let secure = Server::with(&["secure=true"]);
    for version in Version::ALL {
        let share = read_only.share(version).await;
        let error = share.make_dir(&share.root(), "x", &Change::default()).await.unwrap_err();
        assert_eq!(error.kind(), Kind::ReadOnly, "{version}: {}", chain(&error));

        let share = squashed.share(version).await;
        let error = share.make_dir(&share.root(), "x", &Change::default()).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Permission, "{version}: {}", chain(&error));

        let mut target = secure.target(version);
        target.options.reserved_port = Some(true);
        Nfs::new().share(&target).await.unwrap_or_else(|error| panic!("{version}: {}", chain(&error)));
        target.options.reserved_port = Some(false);
        let error = Nfs::new().share(&target).await.unwrap_err();
        assert!(matches!(error.kind(), Kind::NotFound | Kind::Permission), "{version}: {}", chain(&error));
        assert!(chain(&error).contains("`insecure`"), "{}", chain(&error));

        let mut target = secure.target(version);
        target.path = "/not exported".to_owned();
        let error = Nfs::new().share(&target).await.unwrap_err();
        assert!(matches!(error.kind(), Kind::NotFound | Kind::Permission), "{version}: {}", chain(&error));
    }
}

#[tokio::test]
async fn a_server_that_is_not_there_is_reported_at_once() {
    let server = Server::start();
    let mut target = server.target(Version::V4_1);
    drop(server);
    target.options.versions = Version::ALL.to_vec();
    let begun = Instant::now();
    let error = Nfs::new().share(&target).await.unwrap_err();
    assert_eq!(error.kind(), Kind::Unreachable, "{}", chain(&error));
    assert!(chain(&error).contains("Connection refused"), "{}", chain(&error));
    assert!(begun.elapsed() < AT_ONCE);
    target.server = "no such host.invalid".to_owned();
    assert_eq!(Nfs::new().share(&target).await.unwrap_err().kind(), Kind::Invalid);
}

#[tokio::test]
async fn we_are_who_we_say() {
    let server = Server::start();
    fs::set_permissions(server.export(), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    for version in Version::ALL {
        let mut target = server.target(version);
        (target.options.uid, target.options.gid) = (1234, 5678);
        let share = Nfs::new().share(&target).await.unwrap();
        let made = share.make_dir(&share.root(), format!("{version}"), &Change::mode(0o700)).await.unwrap();
        assert_eq!((made.attributes.uid, made.attributes.gid), (1234, 5678));
        let theirs = share.set_attributes(&made.handle, &Change { uid: Some(0), ..Change::default() }).await;
        assert_eq!(theirs.unwrap_err().kind(), Kind::Permission);
    }
}

#[tokio::test]
async fn a_server_in_its_grace_period_is_waited_for() {
    let mut server = Server::with(&["grace=4"]);
    for version in [Version::V4_0, Version::V4_1] {
        let share = server.share(version).await;
        server.send("kill");
        server.send("start");
        share.attributes(&share.root()).await.unwrap();
        let made = share.create(&share.root(), format!("{version}"), Create::New, &Change::default()).await;
        made.unwrap_or_else(|error| panic!("{version}: {}", chain(&error)));
    }
}
