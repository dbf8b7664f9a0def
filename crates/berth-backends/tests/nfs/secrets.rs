//! Calls whose secrets say how the server is reached.

use std::collections::BTreeMap;

use berth_backends::nfs::Nfs;
use berth_csi::{
    Endpoint,
    v1::{self, controller_client::ControllerClient},
};
use futures_util::future::join_all;

use crate::{served::Served, server::Server};

const VOLUMES: usize = 40;

fn capability() -> v1::VolumeCapability {
    use v1::volume_capability::{AccessMode, AccessType, MountVolume, access_mode::Mode};
    v1::VolumeCapability {
        access_type: Some(AccessType::Mount(MountVolume::default())),
        access_mode: Some(AccessMode { mode: Mode::MultiNodeMultiWriter.into() }),
    }
}

/// Two servers export the same share, on two ports that only the secrets tell.
#[tokio::test(flavor = "multi_thread")]
async fn two_classes_on_one_share_with_different_secrets_do_not_mix() {
    let servers = [Server::start("4.2", &[]), Server::start("4.2", &[])];
    assert_eq!(servers[0].share(), servers[1].share());
    let mut config = servers[0].config();
    config.mount_options.clear();
    let dir = servers[0].dir().join("driver");
    std::fs::create_dir(&dir).unwrap();
    let served = Served::start(&dir, Nfs::start(config).await.unwrap()).await;
    let client = ControllerClient::new(berth_csi::connect(&Endpoint::Unix(served.socket.clone())));
    let secrets = |number: usize| {
        let options = servers[number % 2].config().mount_options.remove(0);
        BTreeMap::from([("mountOptions".to_owned(), options)])
    };
    let made = join_all((0..VOLUMES).map(|number| {
        let request = v1::CreateVolumeRequest {
            name: format!("pvc-{number}"),
            volume_capabilities: vec![capability()],
            parameters: servers[0].class(&[]),
            secrets: secrets(number),
            ..Default::default()
        };
        let mut client = client.clone();
        async move { client.create_volume(request).await.unwrap().into_inner().volume.unwrap().volume_id }
    }))
    .await;
    for number in 0..VOLUMES {
        let [own, other] =
            [number, number + 1].map(|server| servers[server % 2].export().join(format!("pvc-{number}")));
        assert!(own.is_dir() && !other.exists(), "pvc-{number} is on the other server");
    }
    join_all(made.into_iter().enumerate().map(|(number, volume_id)| {
        let request = v1::DeleteVolumeRequest { volume_id, secrets: secrets(number) };
        let mut client = client.clone();
        async move { client.delete_volume(request).await.unwrap() }
    }))
    .await;
    for number in 0..VOLUMES {
        assert!(!servers[number % 2].export().join(format!("pvc-{number}")).exists());
    }
    served.end().await;
}
