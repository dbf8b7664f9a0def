//! A driver and its sidecars over tcp://, with TLS in which both show certificates.

use std::fs;

use berth_csi::v1::ProbeRequest;
use berth_csi::{Client, Endpoint};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use tonic::Code;

use crate::sidecars::cluster::{Cluster, PATIENCE};

/// Writes an authority, and certificates that it signs for 127.0.0.1, into the cluster's directory.
fn certificates(cluster: &Cluster, names: &[&str]) {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    fs::write(cluster.path("ca.crt"), authority.pem()).unwrap();
    for name in names {
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate().unwrap();
        fs::write(cluster.path(&format!("{name}.crt")), params.signed_by(&key, &authority).unwrap().pem())
            .unwrap();
        fs::write(cluster.path(&format!("{name}.key")), key.serialize_pem()).unwrap();
    }
}

fn flags(cluster: &Cluster, certificate: &str, key: &str) -> [String; 3] {
    [
        format!("--csi-tls-cert-file={}", cluster.path(&format!("{certificate}.crt")).display()),
        format!("--csi-tls-key-file={}", cluster.path(&format!("{key}.key")).display()),
        format!("--csi-tls-ca-file={}", cluster.path("ca.crt").display()),
    ]
}

fn words<'a>(first: &[&'a str], more: &'a [String]) -> Vec<&'a str> {
    first.iter().copied().chain(more.iter().map(String::as_str)).collect()
}

#[tokio::test]
async fn a_provisioner_reaches_a_driver_over_tls_and_nobody_does_without_a_certificate() {
    let cluster = Cluster::start().await;
    certificates(&cluster, &["driver", "sidecar"]);
    let [_, data, node, kind, topology] = cluster.driver_args();
    let own = flags(&cluster, "driver", "driver");
    let base = ["driver", "local", "--endpoint=tcp://127.0.0.1:0", "--http-endpoint=127.0.0.1:0"];
    let mut args = words(&base, &own);
    args.extend([&data, &node, &kind, &topology].map(String::as_str));
    let mut driver = cluster.berth("driver", &args, &[]);
    let ready = driver.says("endpoint=tcp://").await.unwrap();
    assert!(!driver.log().contains("WITHOUT"), "there is nothing to warn of: {}", driver.log());
    let address = ready.split("endpoint=").nth(1).unwrap().split_whitespace().next().unwrap().to_owned();

    // Whoever shows no certificate gets no answer.
    let endpoint: Endpoint = address.parse().unwrap();
    let status = Client::connect(&endpoint).call(PATIENCE, ProbeRequest {}).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");

    let (own, kubeconfig) = (flags(&cluster, "sidecar", "sidecar"), cluster.kubeconfig());
    let csi_address = format!("--csi-address={address}");
    let provisioner =
        cluster.berth("provisioner", &words(&["csi-provisioner", &csi_address, &kubeconfig], &own), &[]);
    let claim = cluster.claim("data").await;
    cluster.volume_of(&claim).await;
    assert_eq!(cluster.on_disk(), 1);
    provisioner.stop().await.unwrap();
    driver.stop().await.unwrap();
}

#[tokio::test]
async fn tls_files_that_cannot_be_used_are_refused_by_name() {
    let cluster = Cluster::start().await;
    certificates(&cluster, &["one", "two"]);
    let mixed = flags(&cluster, "one", "two");
    let good = flags(&cluster, "one", "one");
    let binary = berth_e2e::driver::binary().unwrap();
    let refused = |args: &[&str]| {
        let output = berth_e2e::machine::command(&binary).args(args).output().unwrap();
        assert!(!output.status.success(), "{args:?}");
        String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout)
    };
    let (tcp, kubeconfig) = ("--csi-address=tcp://127.0.0.1:1", cluster.kubeconfig());
    let said = refused(&words(&["csi-provisioner", tcp, &kubeconfig], &mixed));
    assert!(said.contains("one.crt") && said.contains("two.key"), "{said}");
    let said = refused(&words(&["csi-provisioner", &cluster.csi_address(), &kubeconfig], &good));
    assert!(said.contains("--csi-tls-cert-file") && said.contains("tcp://"), "{said}");
    let said = refused(&["driver", "local", "--endpoint=tcp://127.0.0.1:0", &good[0]]);
    assert!(said.contains("--csi-tls-key-file"), "{said}");
}
