// Runs client-go's informers, elections and event recorders against a server, and checks what they come to know.
//
// usage: informers KUBECONFIG CHANGES. Prints its progress, and at the end that all agree.
package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	namespace = "default"
	writers   = 8
	slots     = 20
	patience  = 2 * time.Minute
)

var (
	definitions = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
	gadgets     = schema.GroupVersionResource{Group: "test.berth.dev", Version: "v1", Resource: "gadgets"}
)

// world holds the clients and how many changes were made.
type world struct {
	typed   kubernetes.Interface
	dynamic dynamic.Interface
	made    atomic.Int64
	total   int64
}

func main() {
	if len(os.Args) != 3 {
		fail("usage: informers KUBECONFIG CHANGES")
	}
	total, err := strconv.ParseInt(os.Args[2], 10, 64)
	check(err)
	config, err := clientcmd.BuildConfigFromFlags("", os.Args[1])
	check(err)
	config.QPS, config.Burst = 10000, 10000
	protobuf := rest.CopyConfig(config)
	protobuf.ContentType = "application/vnd.kubernetes.protobuf"
	protobuf.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	w := &world{typed: kubernetes.NewForConfigOrDie(protobuf), dynamic: dynamic.NewForConfigOrDie(config), total: total}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	w.define(ctx)

	elected := elect(ctx, w.typed)
	stores := w.inform(ctx)
	w.churn(ctx)
	for _, s := range stores {
		s.agree(ctx)
	}
	recordEvents(ctx, w.typed)
	await("an election", func() bool { return elected.Load() > 0 })
	fmt.Println("agreed")
}

// define makes a custom resource, and waits until it is served.
func (w *world) define(ctx context.Context) {
	definition := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
		"metadata": map[string]any{"name": "gadgets.test.berth.dev"},
		"spec": map[string]any{
			"group": "test.berth.dev", "scope": "Namespaced",
			"names": map[string]any{"plural": "gadgets", "singular": "gadget", "kind": "Gadget", "listKind": "GadgetList"},
			"versions": []any{map[string]any{
				"name": "v1", "served": true, "storage": true,
				"schema": map[string]any{"openAPIV3Schema": map[string]any{
					"type":       "object",
					"properties": map[string]any{"spec": map[string]any{"type": "object", "properties": map[string]any{"round": map[string]any{"type": "string"}}}},
				}},
			}},
		},
	}}
	_, err := w.dynamic.Resource(definitions).Create(ctx, definition, metav1.CreateOptions{})
	check(err)
	await("the definition", func() bool {
		_, err := w.dynamic.Resource(gadgets).Namespace(namespace).List(ctx, metav1.ListOptions{})
		return err == nil
	})
}

// store is an informer's cache, and the list it must equal.
type store struct {
	name  string
	cache cache.Store
	list  func(context.Context) (runtime.Object, error)
}

func (w *world) inform(ctx context.Context) []store {
	shared := informers.NewSharedInformerFactory(w.typed, 0)
	custom := dynamicinformer.NewDynamicSharedInformerFactory(w.dynamic, 0)
	core := w.typed.CoreV1()
	all := metav1.ListOptions{}
	stores := []store{
		{"config maps", shared.Core().V1().ConfigMaps().Informer().GetStore(), func(ctx context.Context) (runtime.Object, error) { return core.ConfigMaps("").List(ctx, all) }},
		{"claims", shared.Core().V1().PersistentVolumeClaims().Informer().GetStore(), func(ctx context.Context) (runtime.Object, error) {
			return core.PersistentVolumeClaims("").List(ctx, all)
		}},
		{"volumes", shared.Core().V1().PersistentVolumes().Informer().GetStore(), func(ctx context.Context) (runtime.Object, error) { return core.PersistentVolumes().List(ctx, all) }},
		{"gadgets", custom.ForResource(gadgets).Informer().GetStore(), func(ctx context.Context) (runtime.Object, error) {
			return w.dynamic.Resource(gadgets).List(ctx, all)
		}},
	}
	shared.Start(ctx.Done())
	custom.Start(ctx.Done())
	shared.WaitForCacheSync(ctx.Done())
	custom.WaitForCacheSync(ctx.Done())
	return stores
}

// agree waits until the cache is what is listed.
func (s store) agree(ctx context.Context) {
	var listed map[string]string
	await("a list of "+s.name, func() bool {
		list, err := s.list(ctx)
		if err != nil {
			return false
		}
		items, err := meta.ExtractList(list)
		check(err)
		listed = versions(items)
		return true
	})
	if len(listed) < writers {
		fail(fmt.Sprintf("only %d %s are left", len(listed), s.name))
	}
	await(s.name+" as listed", func() bool {
		var items []runtime.Object
		for _, item := range s.cache.List() {
			items = append(items, item.(runtime.Object))
		}
		return maps.Equal(versions(items), listed)
	})
}

func versions(items []runtime.Object) map[string]string {
	known := map[string]string{}
	for _, item := range items {
		object, err := meta.Accessor(item)
		check(err)
		known[object.GetNamespace()+"/"+object.GetName()] = object.GetResourceVersion()
	}
	return known
}

// churn makes all changes; one that fails since the server is away is made again.
func (w *world) churn(ctx context.Context) {
	var group sync.WaitGroup
	for writer := range writers {
		group.Go(func() {
			// Each begins elsewhere, so that they do not end all together where hardly an object is left.
			for round := writer * 4 * slots / writers; w.made.Load() < w.total; round++ {
				name := fmt.Sprintf("w%d-%d", writer, round%slots)
				err := w.change(ctx, name, round)
				switch {
				case err == nil:
					if made := w.made.Add(1); made%(w.total/10) == 0 {
						fmt.Println("made", made)
					}
				case apierrors.IsNotFound(err), apierrors.IsAlreadyExists(err), apierrors.IsConflict(err):
				case apierrors.IsInvalid(err), apierrors.IsBadRequest(err), apierrors.IsUnsupportedMediaType(err), apierrors.IsInternalError(err):
					check(err)
				default:
					time.Sleep(20 * time.Millisecond)
				}
			}
		})
	}
	group.Wait()
}

// change makes, changes and removes an object of each kind in turn.
func (w *world) change(ctx context.Context, name string, round int) error {
	text := strconv.Itoa(round)
	named := metav1.ObjectMeta{Name: name}
	core := w.typed.CoreV1()
	custom := w.dynamic.Resource(gadgets).Namespace(namespace)
	phase := round / slots % 4
	switch round % 4 {
	case 0:
		switch phase {
		case 0:
			_, err := core.ConfigMaps(namespace).Create(ctx, &corev1.ConfigMap{ObjectMeta: named, Data: map[string]string{"round": text}}, metav1.CreateOptions{})
			return err
		case 3:
			return core.ConfigMaps(namespace).Delete(ctx, name, metav1.DeleteOptions{})
		}
		have, err := core.ConfigMaps(namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		have.Data = map[string]string{"round": text}
		_, err = core.ConfigMaps(namespace).Update(ctx, have, metav1.UpdateOptions{})
		return err
	case 1:
		return w.changeClaim(ctx, name, text, phase)
	case 2:
		return w.changeVolume(ctx, name, text, phase)
	}
	gadget := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "test.berth.dev/v1", "kind": "Gadget",
		"metadata": map[string]any{"name": name}, "spec": map[string]any{"round": text},
	}}
	switch phase {
	case 0:
		_, err := custom.Create(ctx, gadget, metav1.CreateOptions{})
		return err
	case 3:
		return custom.Delete(ctx, name, metav1.DeleteOptions{})
	}
	_, err := custom.Apply(ctx, name, gadget, metav1.ApplyOptions{FieldManager: "informers", Force: true})
	return err
}

func (w *world) changeClaim(ctx context.Context, name, text string, phase int) error {
	claims := w.typed.CoreV1().PersistentVolumeClaims(namespace)
	if phase == 0 {
		claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: name}}
		claim.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}
		claim.Spec.Resources.Requests = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}
		_, err := claims.Create(ctx, claim, metav1.CreateOptions{})
		return err
	}
	claim, err := claims.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if phase == 3 {
		claim.Finalizers = nil
		if _, err = claims.Update(ctx, claim, metav1.UpdateOptions{}); err != nil {
			return err
		}
		return claims.Delete(ctx, name, metav1.DeleteOptions{})
	}
	claim.Status.Conditions = []corev1.PersistentVolumeClaimCondition{{Type: corev1.PersistentVolumeClaimResizing, Status: corev1.ConditionTrue, Message: text}}
	_, err = claims.UpdateStatus(ctx, claim, metav1.UpdateOptions{})
	return err
}

func (w *world) changeVolume(ctx context.Context, name, text string, phase int) error {
	volumes := w.typed.CoreV1().PersistentVolumes()
	if phase == 0 {
		volume := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}}
		volume.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}
		volume.Spec.Capacity = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}
		volume.Spec.CSI = &corev1.CSIPersistentVolumeSource{Driver: "test.berth.dev", VolumeHandle: name}
		_, err := volumes.Create(ctx, volume, metav1.CreateOptions{})
		return err
	}
	volume, err := volumes.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if phase == 3 {
		volume.Finalizers = nil
		if _, err = volumes.Update(ctx, volume, metav1.UpdateOptions{}); err != nil {
			return err
		}
		return volumes.Delete(ctx, name, metav1.DeleteOptions{})
	}
	volume.Annotations = map[string]string{"round": text}
	_, err = volumes.Update(ctx, volume, metav1.UpdateOptions{})
	return err
}

// await fails when something does not come true in time.
func await(what string, is func() bool) {
	end := time.Now().Add(patience)
	for !is() {
		if time.Now().After(end) {
			fail("waited in vain for " + what)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func check(err error) {
	if err != nil {
		fail(fmt.Sprintf("%T: %v", err, err))
	}
}

func fail(why string) {
	fmt.Fprintln(os.Stderr, why)
	os.Exit(1)
}
