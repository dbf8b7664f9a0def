package main

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/client-go/tools/record"
)

// elect lets two candidates contend for a lease; there must never be two leaders.
func elect(ctx context.Context, client kubernetes.Interface) *atomic.Int64 {
	elected, leading := &atomic.Int64{}, &atomic.Int64{}
	for candidate := range 2 {
		lock := &resourcelock.LeaseLock{
			LeaseMeta:  metav1.ObjectMeta{Name: "informers", Namespace: namespace},
			Client:     client.CoordinationV1(),
			LockConfig: resourcelock.ResourceLockConfig{Identity: fmt.Sprintf("candidate-%d", candidate)},
		}
		config := leaderelection.LeaderElectionConfig{
			Lock: lock, LeaseDuration: 15 * time.Second, RenewDeadline: 10 * time.Second, RetryPeriod: 500 * time.Millisecond,
			ReleaseOnCancel: true,
			Callbacks: leaderelection.LeaderCallbacks{
				OnStartedLeading: func(context.Context) {
					elected.Add(1)
					if leading.Add(1) > 1 {
						fail("two leaders")
					}
				},
				OnStoppedLeading: func() { leading.Store(0) },
			},
		}
		go leaderelection.RunOrDie(ctx, config)
	}
	return elected
}

// recordEvents tells of events as components do, several times the same, and finds them with the object's field selector.
func recordEvents(ctx context.Context, client kubernetes.Interface) {
	broadcaster := record.NewBroadcaster(record.WithContext(ctx))
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: client.CoreV1().Events(namespace)})
	recorder := broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "informers"})
	about, err := client.CoreV1().ConfigMaps(namespace).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "noted"}}, metav1.CreateOptions{})
	check(err)
	for range 5 {
		recorder.Event(about, corev1.EventTypeNormal, "Noted", "the same thing")
	}
	options := metav1.ListOptions{FieldSelector: "involvedObject.uid=" + string(about.UID) + ",reason=Noted"}
	await("the events", func() bool {
		events, err := client.CoreV1().Events(namespace).List(ctx, options)
		return err == nil && len(events.Items) == 1 && events.Items[0].Count == 5
	})
	broadcaster.Shutdown()
}
