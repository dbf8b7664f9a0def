//! Directories that several volumes use: none is removed while another volume needs it.

use std::{collections::BTreeMap, fs, time::Duration};

use berth_backends::{Context, Error, Secrets, Volumes as _, nfs::Nfs};
use berth_core::VolumeId;
use berth_csi::{Client, Endpoint, remarks::Remarks, v1::DeleteVolumeRequest};

use crate::{
    calls::{Calls as _, NewVolume},
    served::Served,
    server::{Server, VERSIONS},
};

const DEADLINE: Duration = Duration::from_secs(60);

/// A volume for a claim of the namespace `shop`.
fn claim(server: &Server, name: &str, more: &[(&str, &str)]) -> NewVolume {
    let mut new = server.new_volume(&format!("pvc-{name}"), more);
    for (key, value) in [("pvc/name", name), ("pvc/namespace", "shop"), ("pv/name", &format!("pvc-{name}"))] {
        new.parameters.insert(format!("csi.storage.k8s.io/{key}"), value.to_owned());
    }
    new
}

/// Deletes a volume and gives the warnings.
async fn delete(backend: &Nfs, id: &VolumeId) -> Vec<String> {
    let ctx = Context::new(None, Secrets::default(), &BTreeMap::new());
    backend.controller.delete(&ctx, id).await.unwrap();
    ctx.warnings()
}

fn refusal(answer: berth_backends::Result<berth_backends::Volume>) -> String {
    match answer {
        Err(Error::Precondition(sentence)) => sentence,
        other => panic!("not refused: {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_stays_until_the_last_volume_that_shares_it_is_deleted() {
    for version in VERSIONS {
        let server = Server::start(version, &[]);
        let backend = server.backend().await;
        let alone = [("subDir", "${pvc.metadata.namespace}")];
        let shared = [alone[0], ("shared", "true")];
        let first = backend.create_volume(claim(&server, "a", &alone)).await.unwrap();
        let data = server.export().join("shop/data");
        fs::write(&data, "precious").unwrap();

        // The class has to say that its volumes share directories.
        let sentence = refusal(backend.create_volume(claim(&server, "b", &alone)).await);
        assert!(sentence.contains("claim shop/a") && sentence.contains("shared: \"true\""), "{sentence}");
        let second = backend.create_volume(claim(&server, "b", &shared)).await.unwrap();
        assert_eq!(fs::read_to_string(&data).unwrap(), "precious");

        // Another process deletes: what is known is on the share.
        let backend = server.backend().await;
        let warnings = delete(&backend, &second.id).await;
        assert!(warnings[0].contains("claim shop/a") && warnings[0].contains("kept"), "{warnings:?}");
        assert_eq!(fs::read_to_string(&data).unwrap(), "precious");
        assert!(backend.volume(&first.id).await.unwrap().is_some());

        let third = backend.create_volume(claim(&server, "c", &shared)).await.unwrap();
        assert_eq!(delete(&backend, &first.id).await.len(), 1);
        assert_eq!(fs::read_to_string(&data).unwrap(), "precious");
        assert_eq!(delete(&backend, &third.id).await, Vec::<String>::new());
        backend.drain(DEADLINE).await;
        assert!(!server.export().join("shop").exists(), "the last one removes it");
        assert_eq!(fs::read_dir(server.export().join(".berth/directories")).unwrap().count(), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_stays_while_a_volume_lies_in_it_or_around_it() {
    let server = Server::start("4.2", &[]);
    let backend = server.backend().await;
    let outer = backend.create_volume(claim(&server, "outer", &[("subDir", "team")])).await.unwrap();
    refusal(backend.create_volume(claim(&server, "inner", &[("subDir", "team/a")])).await);
    let beside = backend.create_volume(claim(&server, "beside", &[("subDir", "team-a")])).await.unwrap();
    assert_eq!(delete(&backend, &beside.id).await, Vec::<String>::new());
    let shared = |dir| [("subDir", dir), ("shared", "true")];
    let inner = backend.create_volume(claim(&server, "inner", &shared("team/a"))).await.unwrap();
    let deep = backend.create_volume(claim(&server, "deep", &shared("team/a/b"))).await.unwrap();
    let file = server.export().join("team/a/b/file");
    fs::write(&file, "precious").unwrap();
    assert_eq!(delete(&backend, &outer.id).await.len(), 1);
    assert_eq!(delete(&backend, &inner.id).await.len(), 1);
    assert_eq!(fs::read_to_string(&file).unwrap(), "precious");
    assert_eq!(delete(&backend, &deep.id).await, Vec::<String>::new());
    backend.drain(DEADLINE).await;
    assert!(!file.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn volumes_of_shares_that_lie_in_each_other_are_compared() {
    let server = Server::start("4.2", &[]);
    fs::create_dir_all(server.export().join("team")).unwrap();
    let outer_share = server.new_volume("x", &[]).parameters["share"].clone();
    let inner_share = format!("{outer_share}/team");
    let inner = |name: &str, more: &[(&str, &str)]| {
        let mut new = claim(&server, name, more);
        new.parameters.insert("share".to_owned(), inner_share.clone());
        new
    };
    let backend = server.backend().await;
    let first = backend.create_volume(inner("first", &[("subDir", "a")])).await.unwrap();
    let plain = backend.create_volume(inner("plain", &[])).await.unwrap();
    let file = server.export().join("team/a/file");
    fs::write(&file, "precious").unwrap();
    // Another process has not heard of the inner share; what it finds on the way tells it.
    for dir in ["team", "team/a", "team/a/b", "team/pvc-plain"] {
        let backend = server.backend().await;
        let sentence = refusal(backend.create_volume(claim(&server, "outer", &[("subDir", dir)])).await);
        assert!(sentence.contains("claim shop/"), "{sentence}");
    }
    let shared = [("subDir", "team"), ("shared", "true")];
    let outer = backend.create_volume(claim(&server, "outer", &shared)).await.unwrap();
    assert_eq!(delete(&server.backend().await, &outer.id).await.len(), 1);
    assert_eq!(fs::read_to_string(&file).unwrap(), "precious");

    // The other way round: a volume around the share.
    let outer = backend.create_volume(claim(&server, "outer", &shared)).await.unwrap();
    let backend = server.backend().await;
    refusal(backend.create_volume(inner("second", &[("subDir", "b")])).await);
    for id in [&first.id, &plain.id] {
        let warnings = delete(&backend, id).await;
        assert!(warnings[0].contains("claim shop/outer"), "{warnings:?}");
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "precious");
    // It was there before any volume.
    assert_eq!(delete(&backend, &outer.id).await.len(), 1);
    assert_eq!(fs::read_to_string(&file).unwrap(), "precious");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_with_a_directory_of_its_own_name_is_protected_too() {
    let server = Server::start("4.2", &[]);
    let backend = server.backend().await;
    let plain = backend.create_volume(claim(&server, "plain", &[])).await.unwrap();
    fs::write(server.export().join("pvc-plain/file"), "precious").unwrap();
    for dir in ["pvc-plain", "pvc-plain/sub"] {
        refusal(backend.create_volume(claim(&server, "x", &[("subDir", dir)])).await);
        let shared = [("subDir", dir), ("shared", "true")];
        let other = backend.create_volume(claim(&server, "x", &shared)).await.unwrap();
        assert_eq!(delete(&backend, &other.id).await.len(), 1);
    }
    let inside = [("subDir", "pvc-plain/sub"), ("shared", "true")];
    let inside = backend.create_volume(claim(&server, "x", &inside)).await.unwrap();
    assert_eq!(delete(&backend, &plain.id).await.len(), 1);
    assert_eq!(fs::read_to_string(server.export().join("pvc-plain/file")).unwrap(), "precious");
    assert!(backend.volume(&inside.id).await.unwrap().is_some());
    // The other way round: the name is taken by then.
    refusal(backend.create_volume(claim(&server, "plain", &[])).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn volumes_that_an_older_version_recorded_are_protected() {
    let mut server = Server::start("4.2", &[]);
    let backend = server.backend().await;
    let shared = [("subDir", "team"), ("shared", "true")];
    let first = backend.create_volume(claim(&server, "a", &shared)).await.unwrap();
    let second = backend.create_volume(claim(&server, "b", &shared)).await.unwrap();
    fs::write(server.export().join("team/file"), "precious").unwrap();
    // Older versions had no index. The server is stopped so that it remembers none of it.
    server.send("kill");
    fs::remove_dir_all(server.export().join(".berth/directories")).unwrap();
    server.send("start");
    let backend = server.backend().await;
    assert_eq!(delete(&backend, &second.id).await.len(), 1);
    assert_eq!(fs::read_to_string(server.export().join("team/file")).unwrap(), "precious");
    assert_eq!(delete(&backend, &first.id).await, Vec::<String>::new());
    backend.drain(DEADLINE).await;
    assert!(!server.export().join("team").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_that_was_there_before_its_volume_is_not_removed() {
    let server = Server::start("4.2", &[]);
    let backend = server.backend().await;
    // As a volume has it that csi-driver-nfs made.
    fs::create_dir(server.export().join("team")).unwrap();
    fs::write(server.export().join("team/file"), "precious").unwrap();
    let volume = backend.create_volume(claim(&server, "a", &[("subDir", "team")])).await.unwrap();
    let warnings = delete(&backend, &volume.id).await;
    assert!(warnings[0].contains("was there before"), "{warnings:?}");
    backend.drain(DEADLINE).await;
    assert_eq!(fs::read_to_string(server.export().join("team/file")).unwrap(), "precious");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_archive_goes_into_no_volume_and_takes_no_other_archive_along() {
    let server = Server::start("4.2", &[]);
    let mut config = server.config();
    config.replace_archived = true;
    let backend = Nfs::start(config.clone()).await.unwrap();
    let make = async |name: &str, dir: &str| {
        let volume = backend
            .create_volume(claim(&server, name, &[("subDir", dir), ("onDelete", "archive")]))
            .await
            .unwrap();
        fs::write(server.export().join(dir).join("file"), dir).unwrap();
        volume.id
    };
    let text = |path: &str| fs::read_to_string(server.export().join(path)).unwrap();

    // The archive of `team/app` lies where that of `team` would be.
    let (app, other) = (make("app", "team/app").await, make("other", "team/other").await);
    assert_eq!(delete(&backend, &app).await, Vec::<String>::new());
    assert_eq!(delete(&backend, &other).await, Vec::<String>::new());
    let team = make("team", "team").await;
    assert_eq!(delete(&backend, &team).await, Vec::<String>::new());
    assert_eq!(text("archived-team/app/file"), "team/app");
    assert_eq!(text("archived-team-2/file"), "team");

    // A namespace may be called like an archive.
    let trap = make("trap", "archived-shop").await;
    let shop = make("shop", "shop/data").await;
    let warnings = delete(&backend, &shop).await;
    assert!(warnings[0].contains("claim shop/trap"), "{warnings:?}");
    assert_eq!(text("shop/data/file"), "shop/data");
    assert!(!server.export().join("archived-shop/data").exists());

    // What expires leaves a volume alone that was made in an archive's directory.
    let guest = [("subDir", "archived-team-2"), ("shared", "true")];
    backend.create_volume(claim(&server, "guest", &guest)).await.unwrap();
    config.keep_archived = Some(Duration::ZERO);
    let forgetful = Nfs::start(config).await.unwrap();
    forgetful.volume(&trap).await.unwrap();
    forgetful.drain(DEADLINE).await;
    assert_eq!(text("archived-team-2/file"), "team");
    assert!(!server.export().join("archived-team").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_and_a_snapshot_never_share_a_directory() {
    let server = Server::start("4.2", &[]);
    let backend = server.backend().await;
    let source = backend.create_volume(claim(&server, "source", &[])).await.unwrap();
    let snapshot =
        backend.create_snapshot("snap".parse().unwrap(), &source.id, &BTreeMap::new()).await.unwrap();
    assert!(snapshot.ready);
    // As a subDir, and as the name of a volume without one.
    refusal(backend.create_volume(claim(&server, "x", &[("subDir", "snap")])).await);
    refusal(backend.create_volume(server.new_volume("snap", &[])).await);
    let taken = backend.create_volume(claim(&server, "y", &[("subDir", "later/y")])).await.unwrap();
    let refused = backend.create_snapshot("later".parse().unwrap(), &source.id, &BTreeMap::new()).await;
    assert!(
        matches!(&refused, Err(Error::Precondition(text)) if text.contains("claim shop/y")),
        "{refused:?}"
    );
    assert_eq!(delete(&backend, &taken.id).await, Vec::<String>::new());
    assert!(server.export().join("snap/pvc-source.tar.gz").is_file());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_shares_its_directory_with_nobody() {
    let server = Server::start("4.2", &[]);
    let backend = server.backend().await;
    let of = |kind| [("subDir", "team"), ("shared", "true"), ("kind", kind)];
    let mut new = claim(&server, "a", &of("image"));
    new.capabilities[0].mode = berth_core::AccessMode::SingleNodeWriter;
    backend.create_volume(new.clone()).await.unwrap();
    new.name = "pvc-b".parse().unwrap();
    refusal(backend.create_volume(new).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_caller_of_delete_volume_is_warned_beside_the_answer() {
    let server = Server::start("4.2", &[]);
    let backend = server.backend().await;
    let shared = [("subDir", "größe"), ("shared", "true")];
    backend.create_volume(claim(&server, "a", &shared)).await.unwrap();
    let second = backend.create_volume(claim(&server, "b", &shared)).await.unwrap();
    let driver = Served::start(server.dir(), backend).await;
    let client = Client::connect(&Endpoint::Unix(driver.socket.clone()));
    let request = DeleteVolumeRequest { volume_id: second.id.to_string(), ..DeleteVolumeRequest::default() };
    let answer = client.respond(DEADLINE, request).await.unwrap();
    let warnings = Remarks::of(answer.metadata()).warnings;
    assert!(warnings[0].contains("größe") && warnings[0].contains("claim shop/a"), "{warnings:?}");
    driver.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_whose_directory_somebody_else_removed_does_not_keep_the_directory() {
    let server = Server::start("4.2", &[]);
    let backend = server.backend().await;
    let template = [("subDir", "team/app")];
    backend.create_volume(claim(&server, "old", &template)).await.unwrap();
    fs::remove_dir_all(server.export().join("team")).unwrap();
    // One that has just been recorded may be about to get its directory.
    let sentence = refusal(server.backend().await.create_volume(claim(&server, "new", &template)).await);
    assert!(sentence.contains("claim shop/old"), "{sentence}");
    let drawer = server.export().join(".berth/volumes");
    let long_ago = std::time::SystemTime::now() - Duration::from_hours(2);
    for record in fs::read_dir(&drawer).unwrap() {
        let record = fs::File::options().write(true).open(record.unwrap().path()).unwrap();
        record.set_modified(long_ago).unwrap();
    }
    let backend = server.backend().await;
    let volume = backend.create_volume(claim(&server, "new", &template)).await.unwrap();
    assert!(server.export().join("team/app").is_dir());
    assert_eq!(fs::read_dir(&drawer).unwrap().count(), 1);
    assert_eq!(delete(&backend, &volume.id).await, Vec::<String>::new());
    backend.drain(DEADLINE).await;
    assert!(!server.export().join("team").exists(), "nobody else uses it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_volumes_of_nested_shares_that_are_made_at_once_at_most_one_gets_the_directory() {
    let server = Server::start("4.2", &[]);
    fs::create_dir_all(server.export().join("team")).unwrap();
    let inner_share = format!("{}/team", server.new_volume("x", &[]).parameters["share"]);
    let backend = server.backend().await;
    // Both shares are known.
    let inner = |name: &str, dir: &str| {
        let mut new = claim(&server, name, &[("subDir", dir)]);
        new.parameters.insert("share".to_owned(), inner_share.clone());
        new
    };
    backend.create_volume(inner("first", "first")).await.unwrap();
    for round in 0..10 {
        let dir = format!("app-{round}");
        let outer = claim(&server, &format!("outer-{round}"), &[("subDir", &format!("team/{dir}"))]);
        let inner = inner(&format!("inner-{round}"), &dir);
        let (one, other) = tokio::join!(backend.create_volume(outer), backend.create_volume(inner));
        match (one, other) {
            (Ok(_), Ok(_)) => panic!("round {round}: two claims got one directory"),
            (made, Err(refused)) | (Err(refused), made) => {
                // Who finds a directory gone that the other removes just then is to ask again.
                assert!(matches!(refused, Error::Precondition(_) | Error::Unavailable(_)), "{refused:?}");
                if let Ok(volume) = made {
                    delete(&backend, &volume.id).await;
                }
            }
        }
    }
}
